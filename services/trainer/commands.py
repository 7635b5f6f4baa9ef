"""Commands from rank 0 to the other ranks: one byte for the kind, then the protobuf message of the call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from google.protobuf.message import Message

from flowfleet.proto import trainer_pb2


class Kind(IntEnum):
    STOP = 0
    """Leave the loop and end."""
    CONFIGURE = 1
    TRAIN = 2
    SAVE = 3
    EXPORT = 4
    GATHER_ADAPTER = 5
    """Collect the adapter on rank 0 and put it into the blob store."""
    SEND_WEIGHTS = 6
    """Collect full weights bucket by bucket; rank 0 broadcasts them to its transfer group."""
    SHARE_ADAPTER = 7
    """Collect the adapter on every rank, for the replica that each of them is."""


_MESSAGES: dict[Kind, type[Message] | None] = {
    Kind.STOP: None,
    Kind.CONFIGURE: trainer_pb2.ConfigureRequest,
    Kind.TRAIN: trainer_pb2.TrainStepRequest,
    Kind.SAVE: trainer_pb2.SaveCheckpointRequest,
    Kind.EXPORT: trainer_pb2.ExportModelRequest,
    Kind.GATHER_ADAPTER: trainer_pb2.PublishWeightsRequest,
    Kind.SEND_WEIGHTS: trainer_pb2.PublishWeightsRequest,
    Kind.SHARE_ADAPTER: trainer_pb2.PublishWeightsRequest,
}


@dataclass(frozen=True)
class Command:
    kind: Kind
    message: Message | None = None

    def to_bytes(self) -> bytes:
        return bytes([self.kind]) + (b"" if self.message is None else self.message.SerializeToString())

    @classmethod
    def from_bytes(cls, data: bytes) -> Command:
        kind = Kind(data[0])
        message_class = _MESSAGES[kind]
        return cls(kind, None if message_class is None else message_class.FromString(data[1:]))
