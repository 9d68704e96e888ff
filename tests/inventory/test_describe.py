"""What is said of a model and its optimizer: each storage once, settings as the step will resolve them."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpumon_agent import agent as agents
from gpumon_agent import wire
from gpumon_agent.attribution import describe
from gpumon_agent.attribution.inventory import Inventory


def said(model, *optimizers):
    return describe.model(model, optimizers, index=0, revision=0, name="job", found=False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.norm.weight.requires_grad_(False)


def test_a_tied_parameter_counts_once_and_names_who_counts_it():
    model, modules = said(Tied())
    assert (model.parameters, model.trainable) == (48, 44)
    assert (model.parameter_bytes, model.trainable_bytes) == (192, 176)
    assert model.buffer_bytes == 4 * 8 + 8  # running mean and variance; the count of batches is an int64
    by_path = {m.path: m for m in modules}
    assert by_path["head"].shared_with == "embedding"
    assert (by_path["head"].parameters, by_path["head"].parameter_bytes) == (0, 0)
    assert model.modules == len(modules) == 3


def test_tied_through_data_counts_once_too():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[1].weight.data = model[0].weight.data
    described, modules = said(model)
    assert (described.parameters, described.parameter_bytes) == (16, 64)
    assert modules[1].shared_with == "0"


def test_parameters_that_share_one_flat_storage_count_each():
    flat = torch.zeros(20)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:16]), nn.Parameter(flat[16:])
    described, _ = said(model)
    assert (described.parameters, described.parameter_bytes) == (20, 80)


def test_meta_parameters_have_elements_and_no_bytes():
    described, _ = said(nn.Linear(4, 4, device="meta"))
    assert (described.parameters, described.parameter_bytes, described.devices) == (20, 0, ())


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")  # torch 2.4, on a CPU
def test_a_dtensor_counts_its_elements_and_the_bytes_of_its_local_shard():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:  # torch before 2.5 has them where they began
        from torch.distributed._tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", range(4))
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]))
        described, _ = said(model)
        assert (described.parameters, described.parameter_bytes) == (32, 32)
    finally:
        torch.distributed.destroy_process_group()


def test_adamw_says_what_it_keeps_after_its_first_step():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    [before] = said(model, optimizer)[0].optimizers
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    [after] = said(model, optimizer)[0].optimizers
    assert (before.kind, before.parameters, before.parameter_bytes, before.state_bytes) == ("AdamW", 20, 80, None)
    assert after.state_bytes == 3 * 80 + 2 * 4  # two moments, their maximum, a step count for each parameter
    assert after.settings["amsgrad"] == "True"
    assert after.settings["betas"] == "(0.9, 0.999)"


DEFAULT, FOREACH, FUSED, NEITHER = {}, {"foreach": True}, {"fused": True}, {"foreach": False}


@pytest.mark.parametrize(
    ("kind", "asked"),
    [(kind, asked) for kind in ("Adam", "SGD", "Adagrad") for asked in (DEFAULT, FOREACH, FUSED, NEITHER)]
    + [("RMSprop", asked) for asked in (DEFAULT, FOREACH, NEITHER)],
)
def test_foreach_and_fused_are_what_the_step_will_choose(kind, asked, monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **asked)
    described = describe.optimizer(optimizer)
    module = importlib.import_module(f"torch.optim.{kind.lower()}")
    ran = []

    def noting(form, original):
        def noted(*args, **kwargs):
            ran.append(form)
            return original(*args, **kwargs)

        return noted

    for form in ("_single_tensor", "_multi_tensor", "_fused"):
        name = f"{form}_{kind.lower()}"
        if hasattr(module, name):
            monkeypatch.setattr(module, name, noting(form, getattr(module, name)))
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    expected = "_fused" if described.fused else "_multi_tensor" if described.foreach else "_single_tensor"
    assert ran == [expected]


def test_an_optimizer_without_the_settings_tells_neither():
    described = describe.optimizer(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    assert (described.foreach, described.fused) == (None, None)


def test_groups_that_disagree_are_not_summed_up():
    model = Tied()
    groups = [{"params": [model.embedding.weight], "foreach": True}, {"params": [model.norm.bias], "foreach": False}]
    assert describe.optimizer(torch.optim.SGD(groups, 0.1)).foreach is None


def test_ten_thousand_modules_are_described_in_short_slices():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10_000)))
    *slices, (described, modules) = describe.parts(model, [], index=0, revision=0, name="job", found=True)
    assert len(slices) == 20_000 // 64 + 2 * 127  # 64 tensors each; then what was noted is freed in pieces
    assert described.modules == len(modules) == 10_000


def test_frozen_parameters_of_an_optimizer_do_not_count() -> None:
    """They have no gradient, so they get no state."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    told = describe.optimizer(torch.optim.AdamW(model.parameters()))
    assert (told.parameters, told.parameter_bytes) == (5, 20)


def test_the_newest_64_optimizers_are_told() -> None:
    """A script may make one in each epoch."""
    model = nn.Linear(4, 4)
    told = said(model, *(torch.optim.SGD(model.parameters(), 0.1, momentum=at / 128) for at in range(70)))[0].optimizers
    assert [float(each.settings["momentum"]) * 128 for each in told] == list(range(6, 70))


@pytest.mark.parametrize(("elements", "nbytes"), [(4_096, 4 * 4_096), (4_097, 1 << 20)])
def test_a_slice_of_more_than_16_kib_counts_the_whole_storage_that_it_keeps(elements: int, nbytes: int) -> None:
    """Of a smaller one the storage is not looked up: that would make an object of 90 bytes for each."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1 << 18)[:elements])
    assert said(model)[0].parameter_bytes == nbytes


class DistributedDataParallel(nn.Module):
    """One whose logger reports very many buckets."""

    logger = "any"

    def _get_ddp_logging_data(self) -> dict[str, str]:
        sizes = ", ".join(["26214400"] * 100_000)
        return {"bucket_sizes": sizes, "rebuilt_bucket_sizes": sizes}


def test_a_model_is_described_again_after_its_fifth_step_when_ddp_has_logged_its_buckets() -> None:
    class DistributedDataParallel(nn.Module):
        logger = "any"
        forwards = 0

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.forwards += 1
            return self.module(x)

        def _get_ddp_logging_data(self) -> dict[str, str]:
            return {"bucket_sizes": "20"} if self.forwards >= 5 else {}

    model = DistributedDataParallel()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    agent = agents.REGISTRY.agent = agents.Agent("test", publish=False)
    agent.adopt(model, optimizer)

    def told() -> wire.Model:
        return next(event for event in agent.picture() if isinstance(event, wire.Model))

    states, buckets = [], []
    for _ in range(7):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(told().optimizers[0].state_bytes)
        buckets.append(told().parallel.bucket_bytes)
    agent.leave("stopped")
    assert states[1] == 20, states
    assert buckets[-1] == (20,), buckets


def test_the_sizes_of_any_number_of_buckets_fit_into_a_message() -> None:
    model, _ = said(DistributedDataParallel())
    assert len(wire.encode_event(model)) < wire.EVENT_BYTES_MAX
    assert model.parallel.bucket_bytes[:2] == (26_214_400, 26_214_400)


@pytest.mark.parametrize(("deep", "nbytes"), [(4, 4), (5, 0)])
def test_a_tensor_in_up_to_four_lists_of_an_argument_is_an_input(deep: int, nbytes: int) -> None:
    value: object = torch.ones(1)
    for _ in range(deep):
        value = [value]
    assert Inventory().inputs((value,), {})[0] == nbytes
