"""The Layers screen: the tree opens and closes, sorts, is filtered and told to the byte, and costs nothing at rest."""

from __future__ import annotations

import itertools
import sys

import pytest

from gpumon.analysis.layers import FIGURES, LayerBytes, LayerNode, Tree, trees
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.widgets.layer_lines import LayersData, layer_lines, order_at
from gpumon.tui.widgets.layer_rows import LayerView, all_keys, opened_at_first, rows_of
from gpumon.tui.widgets.layer_table import LayerTable


def leaf(path: str, kind: str, own: int, shared_with: str | None = None) -> LayerNode:
    figures = LayerBytes(own, 0, own, 2 * own, 3 * own)
    return LayerNode(path, path.rpartition(".")[2], kind, own // 4, figures, figures, shared_with)


def holder(path: str, *children: LayerNode, kind: str | None = None) -> LayerNode:
    whole = LayerBytes(*(sum(getattr(child.whole, name) or 0 for child in children) for name in FIGURES))
    return LayerNode(path, path.rpartition(".")[2] or "Net", kind, 0, LayerBytes(), whole, None, children)


NET = Tree(0, 0, 7, holder(
    "", leaf("embed", "Embedding", 400),
    holder("blocks", holder("blocks.0", leaf("blocks.0.up", "Linear", 40), leaf("blocks.0.down", "Linear", 80)),
           holder("blocks.1", leaf("blocks.1.up", "Linear", 44), leaf("blocks.1.down", "Linear", 84))),
    leaf("head", "Linear", 0, "embed"), kind="Net"), 1000)  # fmt: skip


def names(choice: LayerView) -> list[str]:
    return [row.layer.path for row in rows_of((NET,), choice).rows]


def test_a_closed_module_stands_for_all_below_it():
    rows = rows_of((NET,), LayerView(opened=frozenset({(0, "")}))).rows
    blocks = next(row for row in rows if row.layer.path == "blocks")
    assert (blocks.figures.weights, blocks.parameters, blocks.open) == (248, 62, False)


def test_siblings_are_sorted_and_stay_below_their_module():
    assert names(LayerView(all_keys((NET,)), "weights"))[:3] == ["", "embed", "blocks"]
    below = names(LayerView(all_keys((NET,)), "total"))
    assert below[below.index("blocks") :][:4] == ["blocks", "blocks.1", "blocks.1.down", "blocks.1.up"]


def test_activations_of_no_module_are_a_line_of_their_own_and_part_of_the_whole():
    rows = rows_of((NET,), LayerView(opened=frozenset({(0, "")})))
    assert rows.rows[-1].figures == LayerBytes(activations=1000)
    assert rows.rows[0].figures.activations == 3 * (400 + 248) + 1000 == rows.total.activations


def test_the_filter_keeps_what_matches_and_the_way_to_it_and_sums_each_byte_once():
    found = rows_of((NET,), LayerView(wanted="BLOCKS.1"))
    assert [row.layer.path for row in found.rows] == ["", "blocks", "blocks.1", "blocks.1.up", "blocks.1.down"]
    assert (found.matches, found.modules, found.total.weights, found.parameters) == (3, 10, 128, 32)


def test_the_filter_knows_kinds_too():
    assert rows_of((NET,), LayerView(wanted="embedding")).matches == 1


def test_nothing_that_matches_is_an_empty_list():
    assert rows_of((NET,), LayerView(wanted="no such")).rows == ()


def test_the_flat_list_has_each_module_with_what_it_keeps_itself():
    rows = rows_of((NET,), LayerView(order="weights", flat=True)).rows
    assert [row.figures.weights for row in rows if row.figures.weights] == [400, 84, 80, 44, 40]


def test_the_smallest_come_first_when_the_order_is_turned():
    rows = rows_of((NET,), LayerView(order="weights", upwards=True, flat=True)).rows
    weights = [row.figures.weights or 0 for row in rows]
    assert weights == sorted(weights)


def test_as_many_levels_are_open_at_first_as_there_is_room_for():
    assert opened_at_first((NET,), 4) == frozenset({(0, "")})
    assert len(rows_of((NET,), LayerView(opened_at_first((NET,), 30))).rows) == 11


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_lines_keep_their_room_and_tied_weights_are_marked(glyphs):
    rows = rows_of((NET,), LayerView(all_keys((NET,))))
    for room in (20, 40, 80, 120, 200):
        lines = layer_lines(LayersData((NET,), 0), rows, LayerView(), 0, 0, room, 30, glyphs)
        assert all(width(line) <= room for line in lines)
        assert len(lines) <= 30
    assert "head = embed" in plain(lines)


def test_a_click_on_a_heading_finds_its_column():
    found = [order_at(x, 120, "model") for x in range(120)]
    assert [name for name in dict.fromkeys(found) if name != "model"] == [
        "parameters", "weights", "gradients", "optimizer", "activations", "total",
    ]  # fmt: skip


def test_the_work_for_layers_grows_with_their_number_and_no_faster(store_of, new_run):
    def calls(blocks):
        rank = store_of(new_run().hello().modules(blocks=blocks).layers(5)).frame(0).ranks[0]
        count = itertools.count()
        sys.setprofile(lambda frame, event, arg: next(count) if event in ("call", "c_call") else None)
        try:
            made = trees(rank)
            rows = rows_of(made, LayerView(all_keys(made), "total"))
        finally:
            sys.setprofile(None)
        assert len(rows.rows) > 6 * blocks
        return next(count)

    assert calls(160) < 5 * calls(40)


# ---------------------------------------------------------------------------------------------------------- in the app


@pytest.fixture
def a_run(new_run):
    return new_run().hello().modules().steps(12_400, 20).layers(12_419).beat(12_420).synced().host()


def text_of(app) -> str:
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def test_keys_open_sort_and_filter(app_of, a_run, settled) -> None:
    app = app_of(a_run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        table = app.screen.query_one(LayerTable)
        assert "222 modules" in text_of(app)
        await pilot.press("down", "down", "down", "down", "right")
        assert table.here.layer.path == "blocks.0"
        assert table.here.open
        await pilot.press("left", "left")
        assert table.here.layer.path == "blocks"
        await pilot.press("o", "o")
        assert table.choice.order == "weights"
        assert "weights▾" in text_of(app)
        await pilot.press("slash", *"mlp.up")
        assert "24 of 222 modules have “mlp.up”" in text_of(app)
        await pilot.press("enter")
        assert app.focused is table
        await pilot.press("escape")
        assert table.choice.wanted == ""


async def test_the_chosen_module_is_explained_to_the_byte(app_of, a_run, settled) -> None:
    app = app_of(a_run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        await pilot.press("down", "e")
        await settled(pilot)
        shown = text_of(app)
    assert "keeps itself 1,648,427,008 B = weights 412,090,368 + gradients 412,090,368" in shown


async def test_a_click_sorts_and_chooses(app_of, a_run, settled) -> None:
    app = app_of(a_run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        table = app.screen.query_one(LayerTable)
        x = next(x for x in range(120) if order_at(x, 120, "model") == "total")
        await pilot.click(LayerTable, offset=(x, 1))
        assert table.choice.order == "total"
        await pilot.click(LayerTable, offset=(5, 4))
        assert table._at == 2


async def test_the_same_layers_are_neither_made_nor_drawn_again(app_of, a_run, settled) -> None:
    app = app_of(a_run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        table = app.screen.query_one(LayerTable)
        made = table._trees
        drawn: list[int] = []
        original = table.draw
        table.draw = lambda *a: (drawn.append(1), original(*a))[1]
        for _ in range(4):
            app.redraw()
            await pilot.pause(0.05)
        assert drawn == []
        assert table._trees is made


async def test_without_a_model_it_says_so(app_of, new_run, settled) -> None:
    app = app_of(new_run().hello().steps(0, 3).synced())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        assert "known once a model is watched" in text_of(app)
        await pilot.press("down", "enter", "right", "left", "o", "f", "asterisk", "end", "e")
