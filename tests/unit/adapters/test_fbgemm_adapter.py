"""Marks, rows and counters of FBGEMM's table-batched embeddings, against what their kernels really do on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_oracle import Watched, assert_same, restore, save, texts
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from incremental_ckpt.adapters import adapt
from incremental_ckpt.adapters.fbgemm import rows_without_sync
from incremental_ckpt.errors import CheckpointError, SaveError

ROWS, DIMS = (40, 30, 50), (8, 4, 12)
SHARED = [0, 0, 1, 2, 2]  # features 0 and 1 both read table 0, features 3 and 4 table 2
Optimizer = EmbOptimType


def tbe(optimizer: EmbOptimType = Optimizer.EXACT_ROWWISE_ADAGRAD, *, seed: int = 0, features: list[int] = SHARED,
        rows: tuple[int, ...] = ROWS, **options: Any) -> Any:  # fmt: skip
    specs = [(r, d, EmbeddingLocation.HOST, ComputeDevice.CPU) for r, d in zip(rows, DIMS, strict=False)]
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=optimizer, learning_rate=0.1, feature_table_map=features, **options
    )
    generator = torch.Generator().manual_seed(seed)
    for weight in module.split_embedding_weights():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return module


def batch(seed: int, features: list[int] = SHARED, bags: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that repeat, and bags of 0 to 3 of them."""
    generator = torch.Generator().manual_seed(seed)
    ids, lengths = [], []
    for table in features:
        mine = torch.randint(0, 4, (bags,), generator=generator)
        ids.append(torch.randint(0, min(20, ROWS[table]), (int(mine.sum()),), generator=generator))
        lengths.append(mine)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    return torch.cat(ids), offsets


def step(module: Any, seed: int, **options: Any) -> None:
    output = module(*batch(seed), **options)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))).sum().backward()


def needs_gpu(optimizer: EmbOptimType, **options: Any) -> None:
    try:
        step(tbe(optimizer, **options), 0)
    except AssertionError as refusal:
        if "not supported in CPU mode" not in str(refusal):
            raise
        pytest.skip(f"needs a GPU: {refusal}")


@pytest.mark.parametrize(
    "optimizer",
    [Optimizer.EXACT_SGD, Optimizer.EXACT_ADAGRAD, Optimizer.EXACT_ROWWISE_ADAGRAD, Optimizer.ADAM,
     Optimizer.PARTIAL_ROWWISE_ADAM, Optimizer.LAMB, Optimizer.LARS_SGD],
)  # fmt: skip
def test_exactly_the_changed_rows_are_marked(optimizer: EmbOptimType) -> None:
    needs_gpu(optimizer)
    module = tbe(optimizer)
    watched = Watched(module)
    for seed in range(3):
        step(module, seed)
    assert watched.changed() == watched.marked
    assert len(watched.marked) == len(ROWS)
    assert not watched.whole
    assert all(t.tracked for t in watched.adapter.tables())


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN, PoolingMode.NONE])
def test_every_pooling_mode_marks_its_rows(pooling: PoolingMode) -> None:
    features, rows = [0, 1], (40, 30)
    dims = (8, 8)
    specs = [(r, d, EmbeddingLocation.HOST, ComputeDevice.CPU) for r, d in zip(rows, dims, strict=True)]
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=Optimizer.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1, pooling_mode=pooling
    )
    for weight in module.split_embedding_weights():
        weight.copy_(torch.randn(weight.shape))
    watched = Watched(module)
    module(*batch(1, features)).cos().sum().backward()
    assert watched.changed() == watched.marked != {}


def test_one_feature_that_feeds_two_tables_marks_both() -> None:
    module = tbe(features=[0, 1, 2])
    watched = Watched(module)
    ids = torch.tensor([3, 7, 3])
    module(torch.cat([ids, ids, ids]), torch.arange(0, 10)).cos().sum().backward()
    assert watched.marked == {0: {3, 7}, 1: {3, 7}, 2: {3, 7}} == watched.changed()


def test_features_of_one_table_need_not_be_neighbours() -> None:
    features = [0, 1, 2, 1]
    module = tbe(Optimizer.EXACT_ADAGRAD, features=features)  # the CPU's row-wise kernel refuses this order
    watched = Watched(module)
    module(*batch(4, features)).cos().sum().backward()
    assert watched.changed() == watched.marked != {}


def test_weighted_lookups_mark_their_rows() -> None:
    module = tbe()
    watched = Watched(module)
    ids, offsets = batch(3)
    module(ids, offsets, per_sample_weights=torch.rand(len(ids)) + 0.5).cos().sum().backward()
    assert watched.changed() == watched.marked != {}


def test_batches_of_a_different_size_per_feature_mark_their_rows() -> None:
    module = tbe(features=[0, 1, 2])
    watched = Watched(module)
    ids = torch.tensor([1, 2, 3, 9, 9, 4])
    offsets = torch.tensor([0, 2, 3, 5, 6])  # 2 bags of feature 0, 1 of feature 1, 1 of feature 2
    module(ids, offsets, batch_size_per_feature_per_rank=[[2], [1], [1]]).cos().sum().backward()
    assert watched.marked == {0: {1, 2, 3}, 1: {9}, 2: {4}} == watched.changed()


def test_lookups_without_a_backward_mark_nothing() -> None:
    module = tbe()
    watched = Watched(module)
    with torch.no_grad():
        module(*batch(1))
    module.eval()
    module(*batch(3))
    assert watched.marked == {}


def test_a_lookup_marks_at_its_backward_and_not_before() -> None:
    module = tbe()
    watched = Watched(module)
    early = module(*batch(1))
    step(module, 2)
    assert watched.changed() == watched.marked
    watched.begin()  # a snapshot: the marks are frozen
    early.cos().sum().backward()
    assert watched.changed() == watched.marked != {}


def test_lookups_that_accumulate_into_one_backward_are_all_marked() -> None:
    module = tbe()
    watched = Watched(module)
    (module(*batch(1)).cos().sum() + module(*batch(2)).cos().sum()).backward()
    assert watched.changed() == watched.marked != {}


def test_an_output_that_the_loss_does_not_use_marks_nothing() -> None:
    model = nn.ModuleDict({"used": tbe(seed=1), "unused": tbe(seed=2)})
    watched = Watched(model)
    model["unused"](*batch(1))
    step(model["used"], 2)
    assert watched.changed() == watched.marked
    assert set(watched.marked) == {0, 1, 2}


def test_an_output_that_the_loss_uses_in_part_never_marks_too_little() -> None:
    module = tbe()
    watched = Watched(module)
    module(*batch(1))[:, :8].cos().sum().backward()
    changed = watched.changed()
    assert changed
    assert all(rows <= watched.marked[table] for table, rows in changed.items())


def test_several_tbes_mark_their_own_tables() -> None:
    model = nn.ModuleList([tbe(Optimizer.EXACT_SGD, seed=1), tbe(Optimizer.EXACT_ADAGRAD, seed=2)])
    watched = Watched(model)
    step(model[1], 5)
    assert set(watched.marked) == {3, 4, 5}
    step(model[0], 6)
    assert watched.changed() == watched.marked
    names = [t.shard.table for t in watched.adapter.tables()]
    assert names == ["0.table_0", "0.table_1", "0.table_2", "1.table_0", "1.table_1", "1.table_2"]


def test_ids_out_of_range_are_marked_as_what_the_bounds_check_makes_of_them() -> None:
    module = tbe(features=[0, 1, 2], bounds_check_mode=BoundsCheckMode.IGNORE)
    watched = Watched(module)
    module(torch.tensor([1000, 2, 3]), torch.tensor([0, 1, 2, 3])).cos().sum().backward()
    assert watched.marked == {0: {0}, 1: {2}, 2: {3}} == watched.changed()


def test_an_empty_batch_marks_nothing() -> None:
    module = tbe(features=[0, 1, 2])
    watched = Watched(module)
    module(torch.tensor([], dtype=torch.int64), torch.zeros(4, dtype=torch.int64)).sum().backward()
    assert watched.marked == {} == watched.changed()


def test_int32_ids_are_marked() -> None:
    module = tbe(features=[0, 1, 2], embedding_table_index_type=torch.int32, embedding_table_offset_type=torch.int32)
    watched = Watched(module)
    ids, offsets = batch(1, [0, 1, 2])
    module(ids.int(), offsets.int()).cos().sum().backward()
    assert watched.changed() == watched.marked != {}


def test_after_unwatch_nothing_is_marked_even_by_lookups_made_before() -> None:
    module = tbe()
    watched = Watched(module)
    early = module(*batch(1))
    watched.adapter.unwatch()
    early.sum().backward()
    step(module, 2)
    assert watched.marked == {}
    assert not module._forward_hooks


def test_fields_are_live_views_named_after_the_optimizer_state() -> None:
    for optimizer, widths in (
        (Optimizer.EXACT_SGD, {"weight": 8}),
        (Optimizer.EXACT_ADAGRAD, {"weight": 8, "sum": 8}),
        (Optimizer.EXACT_ROWWISE_ADAGRAD, {"weight": 8, "sum": 1}),
    ):
        module = tbe(optimizer)
        table = adapt(module).tables()[0]
        assert {f.name: f.width for f in table.shard.fields} == widths
        assert {k: tuple(v.shape) for k, v in table.tensors.items()} == {k: (40, w) for k, w in widths.items()}
        table.tensors["weight"].fill_(3.0)
        assert torch.equal(module.split_embedding_weights()[0], torch.full((40, 8), 3.0))


def test_counter_modes_keep_their_row_counters_with_the_rows() -> None:
    module = tbe(
        weight_decay_mode=WeightDecayMode.COUNTER,
        counter_based_regularization=CounterBasedRegularizationDefinition(max_counter_update_freq=2),
    )
    adapter = adapt(module)
    names = [f.name for f in adapter.tables()[0].shard.fields]
    assert names == ["weight", "sum", "prev_iter", "row_counter"]
    module.max_counter.fill_(17)
    saved = save(adapter)
    module.max_counter.fill_(0)
    restore(adapter, saved)
    assert module.max_counter.item() == 17


def test_global_weight_decay_is_not_tracked() -> None:
    module = tbe(
        weight_decay_mode=WeightDecayMode.DECOUPLE_GLOBAL,
        global_weight_decay=GlobalWeightDecayDefinition(start_iter=0, lower_bound=0.1),
    )
    tables = adapt(module).tables()
    assert not any(t.tracked for t in tables)
    assert [f.name for f in tables[0].shard.fields] == ["weight", "sum", "prev_iter"]


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [(Optimizer.EMAINPLACE_ROWWISE_ADAGRAD, "sum"), (Optimizer.ENSEMBLE_ROWWISE_ADAGRAD, "momentum1")],
)
def test_modes_that_sweep_whole_tables_are_not_tracked(optimizer: EmbOptimType, state: str) -> None:
    needs_gpu(optimizer)
    tables = adapt(tbe(optimizer)).tables()
    assert not any(t.tracked for t in tables)
    assert {t.shard.fields[1].name for t in tables} == {state}


def test_an_edit_of_the_weights_from_outside_marks_everything() -> None:
    module = tbe()
    watched = Watched(module)
    module.split_embedding_weights()[1][3] = 1.0
    watched.adapter.tables()
    assert watched.whole == {0, 1, 2}
    watched.begin()
    watched.adapter.tables()
    assert watched.whole == set()


def test_an_edit_is_seen_although_a_step_follows_it() -> None:
    module = tbe()
    watched = Watched(module)
    module.split_embedding_weights()[1][3] = 1.0
    step(module, 1)
    assert watched.whole == {0, 1, 2}


def test_a_kernel_that_counts_its_own_writes_is_not_taken_for_an_edit() -> None:
    def count_writes(module: Any, _args: Any, output: torch.Tensor) -> None:
        output.grad_fn.register_hook(lambda *_: torch.autograd.graph.increment_version(module.weights_host))

    module = tbe()
    module.register_forward_hook(count_writes)
    watched = Watched(module)
    for seed in range(2):
        step(module, seed)
    watched.adapter.tables()
    assert watched.whole == set()


def test_a_load_state_dict_marks_everything() -> None:
    module = tbe()
    watched = Watched(nn.Sequential(module))
    module.load_state_dict(tbe(seed=9).state_dict())
    watched.adapter.tables()
    assert watched.whole == {0, 1, 2}


def test_what_is_written_through_the_tables_is_no_edit() -> None:
    watched = Watched(tbe())
    for table in watched.adapter.tables():
        table.tensors["weight"].zero_()
    watched.adapter.tables()
    assert watched.whole == set()


def test_rows_that_managed_collisions_evict_are_marked_before_they_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[int, set[int]]] = []
    monkeypatch.setattr(
        SplitTableBatchedEmbeddingBagsCodegen,
        "reset_embedding_weight_momentum",
        lambda self, *args: seen.append({k: set(v) for k, v in watched.marked.items()}),
    )
    module = tbe()
    watched = Watched(module)
    module.reset_embedding_weight_momentum(
        pruned_indices=torch.tensor([4, 5]), pruned_indices_offsets=torch.tensor([0, 2]),
        logical_table_ids=torch.tensor([1], dtype=torch.int32), buffer_ids=torch.tensor([0], dtype=torch.int32),
    )  # fmt: skip
    assert seen == [{1: {4, 5}}]


@pytest.mark.parametrize(
    "optimizer", [Optimizer.EXACT_SGD, Optimizer.EXACT_ADAGRAD, Optimizer.EXACT_ROWWISE_ADAGRAD, Optimizer.ADAM]
)
def test_a_freshly_built_tbe_goes_on_bit_for_bit(optimizer: EmbOptimType) -> None:
    needs_gpu(optimizer)
    one, other = tbe(optimizer, seed=1), tbe(optimizer, seed=2)
    first, second = adapt(one), adapt(other)
    for seed in range(3):
        step(one, seed)
    one.eval()
    one(*batch(77))  # evaluation advances iter_cpu
    one.set_learning_rate(0.03)
    one.update_hyper_parameters({"eps": 0.25})
    step(other, 50)  # its counters are not at their beginning
    restore(second, save(first))
    for counter in ("iter", "iter_cpu", "learning_rate_tensor", "max_counter"):
        assert torch.equal(getattr(one, counter), getattr(other, counter)), counter
    assert_same(save(first), save(second))
    assert other.get_learning_rate() == pytest.approx(0.03)
    for seed in range(3, 6):
        step(one, seed)
        step(other, seed)
    assert_same(save(first), save(second))


def test_restored_rows_are_not_taken_for_changes() -> None:
    saved = save(adapt(tbe(seed=1)))
    watched = Watched(tbe(seed=2))
    restore(watched.adapter, saved)
    watched.adapter.tables()
    assert watched.whole == set()
    assert watched.marked == {}


def test_counters_are_matched_by_table() -> None:
    saved = save(adapt(nn.ModuleDict({"a": tbe()})))
    assert texts(adapt(nn.ModuleDict({"b": tbe()})), saved[2]) == [
        "the checkpoint has no fused optimizer of 'b.table_0'"
    ]


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = tbe()
        self.top = nn.Linear(sum(DIMS[t] for t in SHARED), 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.top(self.tables(ids, offsets)).cos().sum()


def test_a_save_between_backward_and_the_dense_step_is_refused() -> None:
    model = TwoTower()
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    watched.adapter.state()
    model(*batch(1)).backward()
    with pytest.raises(SaveError, match="has not stepped since"):
        watched.adapter.state()
    optimizer.step()
    at_the_boundary = watched.adapter.state()
    model(*batch(2)).backward()
    watched.adapter.load_state(at_the_boundary)  # a resume ends the broken step
    watched.adapter.state()


def test_without_a_trainable_dense_parameter_there_is_no_middle_of_a_step() -> None:
    model = TwoTower()
    for optimizer in (None, torch.optim.SGD(model.tables.parameters(), lr=0.1)):
        watched = Watched(model, optimizer)
        model(*batch(1)).backward()
        watched.adapter.state()
        watched.adapter.unwatch()


def test_the_rows_of_a_tbe_are_no_dense_state() -> None:
    state = adapt(TwoTower()).state()
    assert list(state["dense"]) == ["top.weight", "top.bias"]


def test_tables_and_their_tensors_are_stable_between_saves() -> None:
    module = tbe()
    adapter = adapt(module)
    before = adapter.tables()
    step(module, 1)
    assert all(a is b for a, b in zip(before, adapter.tables(), strict=True))


def test_tables_on_ssd_are_refused() -> None:
    class SSDTableBatchedEmbeddingBags(nn.Module):
        pass

    with pytest.raises(CheckpointError, match="tower: tables kept on SSD"):
        adapt(nn.ModuleDict({"tower": SSDTableBatchedEmbeddingBags()}))


def test_table_names_of_a_bare_tbe_come_from_fbgemm() -> None:
    module = tbe(table_names=["user", "item", "page"])
    names = [t.shard.table for t in adapt(nn.ModuleDict({"emb": module})).tables()]
    assert names == ["emb.user", "emb.item", "emb.page"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_device_marks_without_sync_miss_no_row_and_leave_the_table_never(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9))
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, 20), min_size=1, max_size=12)), dtype=torch.int32)
    first = data.draw(st.integers(0, len(ids)))
    end = data.draw(st.integers(first, len(ids)))
    ids[first:end].clamp_(max=rows - 1)  # bounds-checked
    marked = rows_without_sync(ids, torch.tensor(first), torch.tensor(end), rows)
    wanted = {r for r in ids[first:end].tolist() if r >= 0}
    assert marked.shape == ids.shape
    assert wanted <= set(marked.tolist()) <= set(range(rows))
    assert len(set(marked.tolist()) - wanted) <= 1


def _other_memory(buffer: torch.Tensor) -> None:
    buffer.data = buffer.detach() * 2


EXCHANGES: dict[str, Callable[[Any], object]] = {
    "memory of the rows": lambda t: _other_memory(t.weights_host),
    "memory of their state": lambda t: _other_memory(t.momentum1_host),
    "parameter": lambda t: setattr(t, "weights_host", nn.Parameter(t.weights_host.detach() * 2)),
    "dtype and back": lambda t: t.half().float(),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES.keys())
@pytest.mark.parametrize("step_before_the_save", [False, True])
def test_rows_whose_memory_is_exchanged_are_all_marked(
    exchange: Callable[[Any], object], step_before_the_save: bool
) -> None:
    table = tbe()
    watched = Watched(table)
    step(table, 1)
    watched.adapter.tables()
    watched.begin()
    exchange(table)
    if step_before_the_save:
        step(table, 2)
    tables = watched.adapter.tables()
    assert watched.whole == set(range(len(tables)))
    weights = [t.tensors["weight"] for t in tables]
    assert all(torch.equal(w, live) for w, live in zip(weights, table.split_embedding_weights(), strict=True))
