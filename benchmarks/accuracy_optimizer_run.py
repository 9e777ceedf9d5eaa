"""The example's DLRM with Adam for its tables, whose two moments are what a restore brings back rounded.

FBGEMM has no Adam on the CPU: the tables are nn.EmbeddingBags with sparse gradients here, trained by SparseAdam. It
must not know how runs are interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import criteo
import numpy as np
import torch
from accuracy_run import Conditions, Learner, Wanted
from digest import _fingerprint, _leaves
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from incremental_ckpt.codecs import decode_records, encode_values
from incremental_ckpt.model import Field, Table

_DENSE_LEARNING_RATE = 0.02
"""As in the example."""
_TAKEN = ("raw", "bf16")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_learner(conditions: Conditions, wanted: Wanted, table_sizes: Sequence[int], device: torch.device) -> Learner:
    """Codecs that the checkpointer does not take are applied to the moments after an exact restore. That comes to the
    same: a record depends on its row alone, and what was decoded once encodes to the same record."""
    model = _model(table_sizes, conditions.dim, device)
    tables = {name: p for name, p in model.named_parameters() if "embedding_bags." in name}
    dense = {name: p for name, p in model.named_parameters() if name not in tables}
    optimizer = CombinedOptimizer(
        [
            KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, lr=_DENSE_LEARNING_RATE)),
            KeyedOptimizerWrapper(tables, lambda p: torch.optim.SparseAdam(p, lr=conditions.learning_rate)),
        ]
    )
    codec = wanted.codec or "raw"
    return Learner(
        model, optimizer, partial(_digest, model, optimizer),
        {"optimizer_codec": codec if codec in _TAKEN else "raw"},
        partial(round_moments, codec),
    )  # fmt: skip


def round_moments(codec: str, tables: Sequence[Table]) -> None:
    """codec: of both moments, or ``first+second``."""
    names = dict(zip(_MOMENTS, codec.split("+") if "+" in codec else (codec, codec), strict=True))
    for table in tables:
        for field in table.shard.fields:
            if field.name in names:
                live = table.tensors[field.name]
                live.copy_(torch.from_numpy(_rounded(live.numpy(), names[field.name], field)))


def _rounded(values: np.ndarray, codec: str, field: Field) -> np.ndarray:
    rows = np.ascontiguousarray(values).view(np.uint8)
    name, encoded = encode_values(rows, codec, field)
    decoded = decode_records(encoded.records, name, field)
    return decoded if encoded.held is None else np.where(encoded.held[:, None], decoded, values)


def _model(table_sizes: Sequence[int], dim: int, device: torch.device) -> DLRMTrain:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows in zip(criteo.CATEGORICALS, table_sizes, strict=True)
    ]
    bags = EmbeddingBagCollection(tables=configs, device=device)
    for bag in bags.embedding_bags.values():
        bag.sparse = True
    dlrm = DLRM(bags, len(criteo.INTEGERS), [128, 64, dim], [128, 64, 1], dense_device=device)
    return DLRMTrain(dlrm)


def _digest(model: torch.nn.Module, optimizer: KeyedOptimizer) -> str:
    state = {**model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    total = hashlib.sha256()
    for path, value in sorted(_leaves(state), key=lambda leaf: leaf[0]):
        total.update(f"{path}: {_fingerprint(value)}\n".encode())
    return total.hexdigest()[:32]
