"""Lineage of weights: a hash chain over the requests that made them, which shows whether they belong to a ledger.

The lineage of version v + 1 is the hash of the lineage of version v and of the TrainStep request of step v. The trainer
keeps it in its record and its checkpoints, the controller in its ledger; each computes its own. A version number alone
does not tell two histories apart: a Redis that lost its newest writes makes the same versions again, from other
requests.
"""

import hashlib
from collections.abc import Mapping, MutableMapping

from flowfleet.proto import trainer_pb2

_DIGITS = 32


def follow(history: Mapping[int, str], request: trainer_pb2.TrainStepRequest) -> str:
    """The lineage of the version that a request makes; "" where that of the version before is not known."""
    before = "" if request.step == 0 else history.get(request.step)
    if before is None:
        return ""
    digest = hashlib.sha256(before.encode())
    digest.update(_identity(request).SerializeToString(deterministic=True))
    return digest.hexdigest()[:_DIGITS]


def digest_of(request: trainer_pb2.TrainStepRequest) -> str:
    """Hashes one request alone, for weights whose earlier lineage is unknown."""
    return hashlib.sha256(_identity(request).SerializeToString(deterministic=True)).hexdigest()[:_DIGITS]


def _identity(request: trainer_pb2.TrainStepRequest) -> trainer_pb2.TrainStepRequest:
    """The request without where rewards answer, which changes from call to call."""
    if not any(reward.addresses for reward in request.gradient_rewards):
        return request
    plain = trainer_pb2.TrainStepRequest()
    plain.CopyFrom(request)
    for reward in plain.gradient_rewards:
        reward.ClearField("addresses")
    return plain


def extend(history: MutableMapping[int, str], request: trainer_pb2.TrainStepRequest) -> None:
    """Adds the version that a request makes, if its lineage is known."""
    if lineage := follow(history, request):
        history[request.step + 1] = lineage


def misfit(applied: int, history: Mapping[int, str], ledger: trainer_pb2.LedgerPosition) -> str:
    """Why weights after `applied` steps do not go with a ledger; empty when they do. Lineages that one side does not
    know are not compared."""
    if applied > ledger.latest:
        return f"version {applied} is ahead of the ledger, which is at version {ledger.version}"
    for version, lineage in ledger.history.items():
        if version <= applied and history.get(version, lineage) != lineage:
            return f"version {applied} was trained from other steps than the ledger's version {version}"
    return ""
