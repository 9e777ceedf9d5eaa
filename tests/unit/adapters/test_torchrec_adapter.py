"""TorchRec's collections, sharded over one rank, fused and plain: names, shards, marks, and training on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_oracle import Watched, assert_same, restore, save
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from incremental_ckpt.adapters import adapt
from incremental_ckpt.errors import MismatchError, SaveError

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning"),  # TorchRec passes it to DDP
    pytest.mark.filterwarnings(
        "ignore:fbgemm..dense_embedding_codegen_lookup_function:UserWarning"
    ),  # in the CPU build
]

TABLES = 4
KEYS = [f"cat_{i}" for i in range(TABLES)]
FEATURES = [[key] for key in KEYS]
SHARED = [["cat_0"], ["cat_1", "cat_0"], ["cat_2"], ["cat_3"]]  # cat_0 feeds two tables, table 1 has two features
BAGS = "model.sparse_arch.embedding_bag_collection.embedding_bags"


def fused(compute_kernel: str = "fused") -> dict[str, Callable[..., Any]]:
    return {
        "t_cat_0": table_wise(rank=0, compute_kernel=compute_kernel),
        "t_cat_1": row_wise(compute_kernel=compute_kernel),
        "t_cat_2": column_wise(ranks=[0, 0], compute_kernel=compute_kernel),
        "t_cat_3": data_parallel(),
    }


def collection(seed: int, features: list[list[str]] = FEATURES) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=f"t_cat_{i}", embedding_dim=8, num_embeddings=50 + i, feature_names=features[i])
        for i in range(TABLES)
    ]
    torch.manual_seed(seed)
    return EmbeddingBagCollection(tables=tables)


def dlrm(seed: int, optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD) -> tuple[Any, Any]:
    bags = collection(seed)
    torch.manual_seed(seed)
    model = DLRMTrain(DLRM(bags, 5, [16, 8], [16, 1]))
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.1})
    shards = construct_module_sharding_plan(
        bags, per_param_sharding=fused(), sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[sharder],
        plan=ShardingPlan(plan={"model.sparse_arch.embedding_bag_collection": shards}),
    )  # fmt: skip
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda p: torch.optim.Adam(p, lr=0.01))
    return parallel, CombinedOptimizer([parallel.fused_optimizer, ("dense", dense)])


def ids(seed: int, bags: int = 4) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (TABLES * bags,), generator=generator)
    values = torch.randint(0, 25, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths)


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (4,), generator=generator)
    return Batch(torch.randn(4, 5, generator=generator), ids(seed), labels)


def step(model: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    loss, _ = model(batch(seed))
    loss.backward()
    optimizer.step()


def test_shards_of_a_sharded_dlrm_have_the_names_and_offsets_of_the_whole_model() -> None:
    model, optimizer = dlrm(1)
    shards = [t.shard for t in adapt(model, optimizer).tables()]
    assert [(s.table.removeprefix(f"{BAGS}."), s.row_start, s.rows, s.col_start, s.cols) for s in shards] == [
        ("t_cat_0", 0, 50, 0, 8), ("t_cat_1", 0, 51, 0, 8), ("t_cat_2", 0, 52, 0, 4), ("t_cat_2", 0, 52, 4, 4),
        ("t_cat_3", 0, 53, 0, 8),
    ]  # fmt: skip
    assert {(s.table_rows, s.table_cols) for s in shards if s.table.endswith("t_cat_2")} == {(52, 8)}
    assert {f"{s.table}.weight" for s in shards} == {k for k in model.state_dict() if "embedding_bags" in k}


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
)
def test_exactly_the_changed_rows_of_fused_tables_are_marked(optimizer: EmbOptimType) -> None:
    model, optimizers = dlrm(1, optimizer)
    watched = Watched(model, optimizers)
    for seed in range(3):
        step(model, optimizers, seed)
    model.eval()
    with torch.no_grad():
        model(batch(9))
    changed = watched.changed()
    assert 4 in changed  # the data-parallel table is trained, too, and saved whole
    del changed[4]
    assert changed == watched.marked
    assert set(changed) == {0, 1, 2, 3}
    assert [t.tracked for t in watched.adapter.tables()] == [True, True, True, True, False]


def test_a_feature_that_feeds_two_tables_marks_both() -> None:
    model = nn.ModuleDict({"sparse": collection(1, SHARED)})
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    shards = construct_module_sharding_plan(
        model["sparse"], per_param_sharding=fused(), sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[sharder], plan=ShardingPlan(plan={"sparse": shards}),
        init_data_parallel=False,
    )  # fmt: skip
    watched = Watched(parallel)
    parallel.module["sparse"](ids(1)).values().cos().sum().backward()
    assert watched.changed() == watched.marked
    assert watched.marked[0] <= watched.marked[1]
    assert set(watched.marked) == {0, 1, 2, 3}


def test_a_backward_after_the_freeze_marks_for_the_next_save() -> None:
    model, optimizers = dlrm(1)
    watched = Watched(model, optimizers)
    loss, _ = model(batch(1))
    watched.begin()
    loss.backward()
    optimizers.step()
    changed = watched.changed()
    del changed[4]
    assert changed == watched.marked != {}


def test_data_parallel_tables_carry_their_dense_optimizers_rows() -> None:
    model, optimizers = dlrm(1)
    adapter = adapt(model, optimizers)
    assert [f.name for f in adapter.tables()[4].shard.fields] == ["weight"]
    step(model, optimizers, 1)
    assert [f.name for f in adapter.tables()[4].shard.fields] == ["weight", "exp_avg", "exp_avg_sq"]
    state = adapter.state()
    assert not [name for name in state["dense"] if "embedding_bags" in name]
    assert set(state["optimizer"]) == {"0.dense"}
    assert set(state["optimizer"]["0.dense"]["state"][f"{BAGS}.t_cat_3.weight"]) == {"step"}


def test_dense_names_are_those_of_the_state_dict() -> None:
    model, optimizers = dlrm(1)
    dense = adapt(model, optimizers).state()["dense"]
    assert set(dense) == {k for k in model.state_dict() if "embedding_bags" not in k}


@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD])
def test_a_freshly_built_dlrm_goes_on_bit_for_bit(optimizer: EmbOptimType) -> None:
    one, first = dlrm(1, optimizer)
    other, second = dlrm(2, optimizer)
    source, target = adapt(one, first), adapt(other, second)
    for seed in range(3):
        step(one, first, seed)
    for group in one.fused_optimizer.param_groups:
        group["lr"] = 0.04  # as a scheduler does; it reaches the TBEs at the next step
    restore(target, save(source))
    assert_same(save(source), save(target))
    for seed in range(3, 6):
        step(one, first, seed)
        step(other, second, seed)
    assert_same(save(source), save(target))
    assert {g["lr"] for g in other.fused_optimizer.param_groups} == {0.04}


def test_a_warmup_of_fused_and_dense_optimizers_goes_on() -> None:
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.1)]
    (one, first), (other, second) = dlrm(1), dlrm(2)
    first, second = WarmupOptimizer(first, stages, lr=0.1), WarmupOptimizer(second, stages, lr=0.1)
    source, target = adapt(one, first), adapt(other, second)
    for seed in range(3):
        step(one, first, seed)
    restore(target, save(source))
    for seed in range(3, 6):
        step(one, first, seed)
        step(other, second, seed)
    assert_same(save(source), save(target))


def test_restored_rows_are_not_taken_for_changes() -> None:
    one, first = dlrm(1)
    other, second = dlrm(2)
    saved = save(adapt(one, first))
    watched = Watched(other, second)
    restore(watched.adapter, saved)
    watched.adapter.tables()
    assert watched.whole == set()
    assert watched.marked == {}


def test_a_load_state_dict_marks_everything() -> None:
    model, optimizers = dlrm(1)
    watched = Watched(model, optimizers)
    model.load_state_dict(model.state_dict())
    watched.adapter.tables()
    assert {0, 1, 2, 3} <= watched.whole


def test_a_save_between_backward_and_the_dense_step_is_refused() -> None:
    model, optimizers = dlrm(1)
    watched = Watched(model, optimizers)
    loss, _ = model(batch(1))
    loss.backward()
    with pytest.raises(SaveError):
        watched.adapter.state()
    optimizers.step()
    watched.adapter.state()


def test_new_kernels_of_the_same_shards_are_followed_and_marked_whole() -> None:
    model, optimizers = dlrm(1)
    watched = Watched(model, optimizers)
    sharded = model.module.model.sparse_arch.embedding_bag_collection
    replacement = dlrm(2)[0].module.model.sparse_arch.embedding_bag_collection
    sharded._lookups[:3] = replacement._lookups[:3]
    tables = watched.adapter.tables()
    assert {0, 1, 2, 3} <= watched.whole
    twin = adapt(replacement).tables()
    assert tables[0].tensors["weight"].data_ptr() == twin[0].tensors["weight"].data_ptr()
    watched.begin()
    loss, _ = model(batch(1))
    loss.backward()
    changed = watched.changed()
    changed.pop(4, None)
    assert changed == watched.marked != {}


def test_another_sharding_is_an_error_that_says_what_to_do() -> None:
    model, optimizers = dlrm(1)
    adapter = adapt(model, optimizers)
    del model.module.model.sparse_arch.embedding_bag_collection._lookups[1]
    with pytest.raises(MismatchError, match="resharded"):
        adapter.tables()


def test_neither_tables_nor_state_asks_the_model_for_its_state_dict() -> None:
    model, optimizers = dlrm(1)
    watched = Watched(model, optimizers)
    step(model, optimizers, 1)
    calls = {"tables": watched.adapter.tables, "state": watched.adapter.state}
    assert all(a is b for a, b in zip(calls["tables"](), calls["tables"](), strict=True))
    model.state_dict = lambda *_: pytest.fail("the model's state_dict is too slow for the stall")
    for call in calls.values():
        call()


class Sequences(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        tables = [
            EmbeddingConfig(name=f"t_cat_{i}", embedding_dim=8, num_embeddings=50 + i, feature_names=FEATURES[i])
            for i in range(TABLES)
        ]
        self.ec = EmbeddingCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.ec(features)
        return torch.stack([found[k].values().cos().sum() for k in KEYS]).sum()


def test_sharded_sequences_mark_exactly_the_changed_rows() -> None:
    model = Sequences(1)
    # The CPU's dense kernel pools where sequences are asked for, so no table is data-parallel here.
    sharding = fused() | {"t_cat_3": table_wise(rank=0, compute_kernel="fused")}
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    shards = construct_module_sharding_plan(
        model.ec, per_param_sharding=sharding, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[sharder], plan=ShardingPlan(plan={"ec": shards})
    )
    watched = Watched(parallel)
    names = {t.shard.table for t in watched.adapter.tables()}
    assert names == {f"ec.embeddings.t_cat_{i}" for i in range(TABLES)}
    for seed in range(2):
        parallel(ids(seed)).backward()
    assert watched.changed() == watched.marked
    assert set(watched.marked) == set(range(TABLES + 1))  # one of them in two column shards


def test_an_unsharded_collection_is_made_of_plain_tables_of_the_same_names() -> None:
    bags = collection(1)
    model = nn.ModuleDict({"sparse": bags})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    tables = watched.adapter.tables()
    assert [t.shard.table for t in tables] == [f"sparse.embedding_bags.t_cat_{i}" for i in range(TABLES)]
    assert [[f.name for f in t.shard.fields] for t in tables] == [["weight", "sum"]] * TABLES
    assert not any(t.tracked for t in tables)  # TorchRec builds them with dense gradients


def test_fused_collections_used_bare_are_tracked() -> None:
    config = [
        EmbeddingBagConfig(name=f"t_{i}", embedding_dim=8, num_embeddings=40 + i, feature_names=FEATURES[i])
        for i in range(TABLES)
    ]
    bags = FusedEmbeddingBagCollection(
        config, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}, device=torch.device("cpu")
    )
    watched = Watched(bags, bags.fused_optimizer())
    assert [t.shard.table for t in watched.adapter.tables()] == [f"embedding_bags.t_{i}" for i in range(TABLES)]
    bags(ids(1)).values().cos().sum().backward()
    assert watched.changed() == watched.marked != {}
    assert watched.adapter.state()["dense"] == {}
    watched.begin()
    bags.load_state_dict(bags.state_dict())
    watched.adapter.tables()
    assert watched.whole == {0, 1, 2, 3}
