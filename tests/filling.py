"""Weights to broadcast from whole tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flowfleet.proto.rollout_pb2 import Bucket
from flowfleet.weights.weights import Fill, views


def filling(tensors: Mapping[str, Tensor]) -> Fill:
    """A `fill` that takes whole tensors by name, cast to the buckets' dtypes."""

    @torch.no_grad()
    def fill(bucket: Bucket, flat: Tensor) -> None:
        for spec, view in views(bucket, flat):
            view.copy_(tensors[spec.name])

    return fill
