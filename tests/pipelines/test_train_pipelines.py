"""TorchRec's pipelines read batches ahead of training: a resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from adapter_oracle import Saved, assert_same, save
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from incremental_ckpt import Checkpointer, EverySteps, PairedReader, Settings
from incremental_ckpt.adapters import adapt
from incremental_ckpt.policy import KindPolicy
from incremental_ckpt.storage import MemoryStore

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning"),  # TorchRec passes it to DDP
    pytest.mark.filterwarnings(
        "ignore:fbgemm..dense_embedding_codegen_lookup_function:UserWarning"
    ),  # in the CPU build
]

KEYS = [f"cat_{i}" for i in range(4)]
EPOCH, STEPS = 7, 24
PIPELINES = [TrainPipelineBase, TrainPipelineSparseDist]


class Reader:
    """Epochs of seven batches in an order of its own; every batch is a function of its id."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return (self.epoch * EPOCH + torch.randperm(EPOCH, generator=generator)).tolist()

    def __iter__(self) -> Iterator[Batch]:
        for number in self.order()[self.position :]:
            self.position += 1
            yield batch(number)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + number)
    lengths = torch.randint(0, 4, (len(KEYS) * 4,), generator=generator)
    values = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(4, 5, generator=generator)
    dense[0, 0] = number  # so that what was trained can be told
    labels = torch.randint(0, 2, (4,), generator=generator)
    return Batch(dense, KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths), labels)


def dlrm(seed: int) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    tables = [EmbeddingBagConfig(name=f"t_{k}", embedding_dim=8, num_embeddings=50, feature_names=[k]) for k in KEYS]
    torch.manual_seed(seed)
    bags = EmbeddingBagCollection(tables=tables)
    model = DLRMTrain(DLRM(bags, 5, [16, 8], [16, 1]))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    ways = {
        "t_cat_0": table_wise(rank=0), "t_cat_1": row_wise(), "t_cat_2": column_wise(ranks=[0, 0]),
        "t_cat_3": data_parallel(),
    }  # fmt: skip
    plan = construct_module_sharding_plan(
        bags, per_param_sharding=ways, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[sharder],
        plan=ShardingPlan(plan={"model.sparse_arch.embedding_bag_collection": plan}),
    )  # fmt: skip
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    return parallel, KeyedOptimizerWrapper(parameters, lambda p: torch.optim.Adam(p, lr=0.01))


class Life:
    """One process of a run: a model of its own, a pipeline, a reader, and what it has trained."""

    def __init__(self, pipeline: type, seed: int) -> None:
        self.model, self.optimizer = dlrm(seed)
        self.reader = PairedReader(Reader())
        self.pipeline = pipeline(self.model, self.optimizer, torch.device("cpu"))
        self.trained: list[int] = []
        self.model.register_forward_pre_hook(lambda module, inputs: self.see(inputs[0]))

    def see(self, trained: Batch) -> None:
        self.trained.append(int(trained.dense_features[0, 0]))

    def step(self) -> None:
        while self.reader.progress(self.pipeline) is None:
            if isinstance(self.pipeline, TrainPipelineBase) and not isinstance(self.pipeline, TrainPipelineSparseDist):
                self.pipeline.reset()

    def copy(self) -> Saved:
        return save(adapt(self.model, self.optimizer))


@pytest.fixture(scope="module", params=PIPELINES)
def uninterrupted(request: pytest.FixtureRequest) -> tuple[type, list[int], Saved]:
    life = Life(request.param, seed=0)
    for _ in range(STEPS):
        life.step()
    return request.param, life.trained, life.copy()


def test_a_pipeline_trains_every_batch_of_every_epoch_once_and_in_order(
    uninterrupted: tuple[type, list[int], Saved],
) -> None:
    reader = Reader()
    expected: list[int] = []
    while len(expected) < STEPS:
        expected += reader.order()
        reader.epoch += 1
    assert uninterrupted[1] == expected[:STEPS]


@pytest.mark.parametrize(
    ("kind", "every", "stops"),
    [
        ("intermittent", 3, [4, 11, 17]),  # in the middle of epochs
        ("consecutive", 7, [8, 13, 16, 23]),  # resumed at the end of an epoch
        ("one-shot", 5, [6, 7, 20]),
        ("full", 4, [5, 6, 14]),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    uninterrupted: tuple[type, list[int], Saved], kind: KindPolicy, every: int, stops: list[int], store_name: str
) -> None:
    pipeline, expected, truth = uninterrupted
    trained: list[int] = []
    for number, stop in enumerate([*stops, STEPS]):
        life = Life(pipeline, seed=number and 10 + number)  # later lives begin with other weights
        with Checkpointer(
            life.model, MemoryStore(store_name), optimizer=life.optimizer, state={"reader": life.reader},
            when=EverySteps(every), kind=kind, busy="wait", settings=Settings(low_priority=False),
        ) as checkpointer:  # fmt: skip
            progress = checkpointer.resume_from_checkpoint()
            done = progress.step if progress else 0
            assert done == (stops[number - 1] // every * every if number else 0)
            del trained[done:]  # what the life before trained in vain
            for step in range(done + 1, stop + 1):
                life.step()
                checkpointer.step(step)
            if pipeline is TrainPipelineSparseDist and stop % EPOCH not in (0, EPOCH - 1):
                assert life.reader.ahead > 0, "nothing was read ahead, so the test shows nothing"
        trained += life.trained
    assert trained == expected
    assert_same(life.copy(), truth)
