"""The root model is found from the optimizer's parameters, in all the ways people put a model together."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

from gpumon_agent.hooks import model_discovery  # noqa: E402 (it imports torch)


class Seen:
    """Stands where the agent stands, and notes what it is told."""

    def __init__(self) -> None:
        self.adopted: list[tuple[str, str]] = []
        self.entries: dict[int, tuple[weakref.ref, object]] = {}
        self.called: list[str] = []
        self.evaluated: list[str] = []
        self.homeless_optimizers = 0

    def adopt(self, model, optimizer):
        self.adopted.append((type(model).__name__, type(optimizer).__name__))
        self.enter(model)

    def enter(self, module):
        def called(module, args):
            self.called.append(type(module).__name__)

        self.entries[id(module)] = (weakref.ref(module), module.register_forward_pre_hook(called))

    def let_go(self, module):
        self.entries.pop(id(module))[1].remove()

    def entered(self, module):
        return id(module) in self.entries and type(module).__name__ in self.called

    def evaluates(self, module):
        self.evaluated.append(type(module).__name__)

    def homeless(self, optimizer):
        self.homeless_optimizers += 1


@pytest.fixture
def seen():
    gc.collect()  # models of the tests before are no copies
    seen = Seen()
    finder = model_discovery.install(seen)
    yield seen
    finder.stop()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Head(Net):
    pass


def train(call, optimizer, steps=3):
    for _ in range(steps):
        call(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def names(seen):
    return [type(ref()).__name__ for ref, _ in seen.entries.values()]


def test_a_plain_model_is_adopted_as_its_optimizer_is_built(seen):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    assert seen.adopted == [("Net", "AdamW")]
    train(model, optimizer)
    assert names(seen) == ["Net"]


def test_a_single_layer_is_a_model(seen):
    optimizer = torch.optim.SGD((model := nn.Linear(4, 4)).parameters(), 0.1)
    train(model, optimizer)
    assert seen.adopted == [("Linear", "SGD")]


def test_teachers_and_losses_are_left_alone_and_an_average_is_a_copy(seen):
    teacher, model = Net(), Head()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert (seen.adopted, seen.evaluated) == ([("Head", "SGD")], ["Head"])
    train(model, optimizer)
    assert (seen.adopted, seen.evaluated) == ([("Head", "SGD")], ["Head", "Head"])
    later = torch.optim.swa_utils.AveragedModel(model)
    assert seen.evaluated == ["Head", "Head", "Head"]
    del teacher, ema, later


def test_the_copy_in_a_policy_is_known_before_the_first_step(seen):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.target = Net(), Net()

        def forward(self, x):
            return self.q(x)

    policy = Policy()
    torch.optim.SGD(policy.q.parameters(), 0.1)
    assert seen.evaluated == ["Net"]


def test_what_a_wrapper_holds_may_be_evaluated_by_itself(seen):
    wrapped = nn.DataParallel(Net())
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
    assert (names(seen), seen.evaluated) == (["DataParallel"], ["Net"])
    compiled = nn.DataParallel(torch.compile(Head(), backend="eager"))
    train(compiled, torch.optim.SGD(compiled.parameters(), 0.1))
    assert seen.evaluated == ["Net"]


@pytest.mark.parametrize("how", ["deepcopy", "unpickled", "taken out of a larger model that is gone"])
def test_models_that_come_from_elsewhere_are_known(seen, how):
    if how == "deepcopy":
        model = copy.deepcopy(Net())
    elif how == "unpickled":
        torch.save(Net(), buffer := io.BytesIO())
        buffer.seek(0)
        model = torch.load(buffer, weights_only=False)
    else:
        model = nn.Sequential(Net(), Net())[0]
        gc.collect()
    torch.optim.SGD(model.parameters(), 0.1)
    assert seen.adopted == [("Net", "SGD")]


def test_a_container_without_a_forward_leads_to_what_is_called(seen):
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = Net(), Head()

    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    train(lambda x: agent.actor(x) + agent.critic(x), optimizer)
    assert seen.called[:2] == ["Net", "Head"]
    assert seen.adopted == [("Agent", "SGD")]


def test_a_trainers_module_whose_forward_is_never_called_is_seen_from_its_first_step(seen):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            raise AssertionError

        def training_step(self, x):
            return self.net(x)

    module = Module()
    train(module.training_step, torch.optim.SGD(module.parameters(), 0.1))
    assert seen.called == ["Net"] * 3


def test_the_parts_that_a_models_own_method_calls_in_turn_are_no_models(seen):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Net(), Head()

        def forward(self, x):
            raise AssertionError

    model = Model()
    train(lambda x: model.decoder(model.encoder(x)), torch.optim.SGD(model.parameters(), 0.1))
    assert seen.called == []
    assert names(seen) == ["Model"]


def test_the_layers_of_a_model_whose_own_method_trains_it_are_no_models(seen):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 4)
            self.blocks = nn.ModuleList(Net() for _ in range(3))

        def forward(self, x):
            raise AssertionError

    model = Model()
    train(model.blocks[0], torch.optim.SGD(model.parameters(), 0.1))
    assert seen.called == []
    assert names(seen) == ["Model"]


def test_both_optimizers_of_a_gan_in_one_module_lead_to_it(seen):
    gan = nn.ModuleDict({"g": Net(), "d": Head()})
    torch.optim.Adam(gan["g"].parameters())
    torch.optim.Adam(gan["d"].parameters())
    assert seen.adopted == [("ModuleDict", "Adam"), ("ModuleDict", "Adam")]
    assert set(names(seen)) >= {"Net", "Head"}


def test_a_wrapper_put_on_after_the_optimizer_is_an_entry_too(seen):
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapper = Wrapper(model)
    train(wrapper, optimizer, steps=1)
    assert seen.called == ["Wrapper", "Net"]


def test_tensors_of_no_module_are_told_apart(seen):
    torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
    assert (seen.adopted, seen.homeless_optimizers) == ([], 1)


def test_nothing_found_is_kept_alive(seen):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dead = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)


def test_uninstall_leaves_torch_as_it_was():
    from torch.nn.modules import module

    init, setstate = torch.optim.Optimizer.__init__, nn.Module.__setstate__
    finder = model_discovery.install(Seen())
    assert torch.optim.Optimizer.__init__ is not init
    finder.stop()
    assert torch.optim.Optimizer.__init__ is init
    assert nn.Module.__setstate__ is setstate
    assert not module._global_module_registration_hooks
    assert not module._global_parameter_registration_hooks


def test_an_optimizer_that_refuses_its_arguments_raises_as_without_the_search(seen):
    with pytest.raises(ValueError, match="empty parameter list") as raised:
        torch.optim.SGD([], 0.1)
    assert not [entry for entry in raised.traceback if entry.path.name == "find.py"]
