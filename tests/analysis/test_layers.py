"""A model's tree: every module where it stands, sums upwards, order as the model holds its modules."""

from __future__ import annotations

from synthetic import Run, apply

from gpumon.analysis.layers import LayerBytes, merged, trees
from gpumon_agent import wire


def module(path: str, nbytes: int, shared_with: str | None = None) -> wire.Module:
    return wire.Module(0, 0, path, "Linear", nbytes // 4, nbytes, nbytes, 0, shared_with)


def a_rank(*layers: wire.Layer, modules: tuple[wire.Module, ...]):
    run = Run()
    model, *_ = run.model()
    events = [run.hello(), model, *modules, *wire.layers(0, 0, 5, layers, 64)]
    return apply([run.received(event, -1) for event in events]).frame(0).ranks[0]


def test_totals_are_sums_of_what_each_module_keeps_itself() -> None:
    modules = (module("", 8), module("block.0.up", 40), module("block.0.down", 80))
    layers = (
        wire.Layer("", "Net", 8, 16, 0),
        wire.Layer("block.0", "Block", None, None, 3),
        wire.Layer("block.0.up", "Linear", 40, 80, 100),
        wire.Layer("block.0.act", "GELU", None, None, 400),
        wire.Layer("block.0.down", "Linear", 80, 160, 200),
    )
    (tree,) = trees(a_rank(*layers, modules=modules))
    assert (tree.step, tree.elsewhere, tree.root.kind) == (5, 64, "Net")
    assert tree.root.own == LayerBytes(8, 0, 8, 16, 0)
    assert tree.root.whole == LayerBytes(128, 0, 128, 256, 703)
    (block,) = tree.root.children
    assert (block.name, block.kind, block.whole.activations) == ("block", None, 703)
    assert [child.name for child in block.children[0].children] == ["up", "act", "down"]
    assert block.children[0].whole.total == 120 + 120 + 240 + 703


def test_before_a_step_was_sampled_only_what_the_model_tells_is_known() -> None:
    run = Run()
    (tree,) = trees(apply(run.picture()).frame(0).ranks[0])
    assert (tree.step, tree.root.whole) == (None, LayerBytes(run.weights, 0))


def test_modules_and_layers_keep_the_order_of_the_model() -> None:
    modules = [module(path, 4) for path in ("a", "frozen", "b.c", "z")]
    layers = [wire.Layer(path, "X") for path in ("a", "a.act", "b.c", "b.drop")]
    paths = list(dict.fromkeys(entry.path for entry in merged(modules, layers)))
    assert paths == ["a", "a.act", "frozen", "b.c", "b.drop", "z"]
