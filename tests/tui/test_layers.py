"""The Layers screen: the tree opens and closes, sorts, is filtered and told to the byte, and costs nothing at rest."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
from msgspec.structs import replace
from pictured import text_of

from gpumon.analysis.layer_repeats import path_of, runs, sentence
from gpumon.analysis.layers import FIGURES, LayerBytes, LayerNode, Tree, trees
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.widgets.layer_lines import TALL, LayersData, explanation, layer_lines, order_at
from gpumon.tui.widgets.layer_rows import LayerView, all_keys, opened_at_first, rows_of
from gpumon.tui.widgets.layer_table import LayerTable

MIB, GIB = 1 << 20, 1 << 30


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


# ------------------------------------------------------------------------------------------------------------- repeats


def block(number: int, activations: int = 300 * MIB, kind: str = "Linear", name: str = "blocks") -> LayerNode:
    """With 200 MiB of weights in one Linear, and what autograd saved."""
    path = f"{name}.{number}"
    figures = LayerBytes(weights=200 * MIB, activations=activations)
    inner = LayerNode(f"{path}.up", "up", kind, 50 * MIB, figures, figures)
    return LayerNode(path, str(number), None, 0, LayerBytes(), figures, None, (inner,))


def net_of(*blocks: LayerNode, elsewhere: int | None = None) -> Tree:
    return Tree(0, 0, 55, holder("", leaf("embed", "Embedding", 4 * MIB), holder("blocks", *blocks)), elsewhere)


def folds(*blocks: LayerNode) -> list[str]:
    return [path_of(run) for run in runs(blocks)]


def test_equal_blocks_are_one_row_with_exact_sums_and_enter_shows_each() -> None:
    tree = net_of(*(block(number, 300 * MIB + number) for number in range(16)))
    opened = opened_at_first((tree,), 30)
    rows = rows_of((tree,), LayerView(opened)).rows
    assert [row.layer.name for row in rows] == ["Net", "embed", "blocks", "0–15"]
    assert rows[3].figures == LayerBytes(weights=16 * 200 * MIB, activations=16 * 300 * MIB + sum(range(16)))
    assert rows[3].parameters == 16 * 50 * MIB
    assert rows_of((tree,), LayerView(opened)).modules == 1 + 1 + 1 + 2 * 16
    each = rows_of((tree,), LayerView(opened | {rows[3].key})).rows
    assert [row.layer.name for row in each[4:]] == [str(number) for number in range(16)]
    lines = layer_lines(LayersData((tree,), 0), rows_of((tree,), LayerView(opened)), LayerView(opened), 3, 0, 120, 30,
                        UNICODE)  # fmt: skip
    assert "blocks.0–15  × 16, 500.0 MiB each, 7.81 GiB together" in plain(lines)


def test_what_differs_in_a_digit_that_is_shown_is_a_row_of_its_own() -> None:
    assert folds(*(block(number) for number in range(4))) == ["blocks.0–3"]
    odd = block(1, 301 * MIB)
    assert folds(block(0), odd, block(2), block(3)) == ["blocks.0", "blocks.1", "blocks.2–3"]
    assert folds(block(0), block(1, 300 * MIB + 1), block(2)) == ["blocks.0–2"]
    assert folds(block(0), block(1, kind="Conv2d"), block(2)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_only_consecutive_numbers_are_repeats() -> None:
    assert folds(block(0), block(2), block(3)) == ["blocks.0", "blocks.2–3"]
    assert folds(leaf("gate", "Linear", 4), leaf("up", "Linear", 4)) == ["gate", "up"]
    assert folds(leaf("layer1", "Linear", 4), leaf("layer2", "Linear", 4)) == ["layer1–2"]
    assert folds(leaf("a1", "Linear", 4), leaf("b2", "Linear", 4)) == ["a1", "b2"]


def test_a_filter_and_the_flat_list_have_each_module() -> None:
    tree = net_of(*(block(number) for number in range(16)))
    assert rows_of((tree,), LayerView(wanted="up")).matches == 16
    assert len(rows_of((tree,), LayerView(flat=True)).rows) == 17
    leaves = holder("", leaf("layer1", "Linear", 4), leaf("layer2", "Linear", 4))
    for choice, shown in ((LayerView(flat=True), []), (LayerView(wanted="layer"), ["Net"])):
        rows = rows_of((Tree(0, 0, 1, leaves, None),), choice).rows
        assert [row.layer.name for row in rows] == [*shown, "layer1", "layer2"]


def test_one_sentence_says_where_most_is() -> None:
    tree = net_of(*(block(number) for number in range(16)), elsewhere=12 * MIB)
    assert sentence((tree,)) == "99.5 % is in blocks.0–15: 16 × 500.0 MiB, of which 300.0 MiB activations"
    assert sentence(()) == ""
    assert sentence((net_of(elsewhere=99 * MIB),)) == "78 % was saved outside its modules: 99.0 MiB of activations"


@pytest.mark.parametrize(("other", "start"), [(799, "50 % is in b: "), (800, "The largest part is b, 50 %: ")])
def test_most_is_more_than_half(other: int, start: str) -> None:
    figures = [LayerBytes(activations=value) for value in (800, other)]
    made = [LayerNode(name, name, "Linear", 0, own, own) for name, own in zip("bc", figures, strict=True)]
    assert sentence((Tree(0, 0, 1, holder("", *made), None),)).startswith(start)


def test_a_part_is_taken_apart_while_one_of_its_parts_has_more_than_half() -> None:
    tree = Tree(0, 0, 1, holder("", leaf("a", "Linear", 10), holder("b", leaf("b.x", "Linear", 40),
                                                                   leaf("b.y", "Linear", 41))), None)  # fmt: skip
    assert sentence((tree,)).startswith("89 % is in b: ")


def shown_at(layers: LayersData, room: int = 120, height: int = 40, glyphs: Any = UNICODE, **how: Any) -> str:
    choice = LayerView(opened_at_first(layers.trees, 30), **how)
    layers = replace(layers, most=sentence(layers.trees))
    return plain(layer_lines(layers, rows_of(layers.trees, choice), choice, 0, 0, room, height, glyphs))


def test_it_says_when_it_was_read_and_why_totals_exceed_the_peak() -> None:
    tree = net_of(*(block(number) for number in range(16)))
    shown = shown_at(LayersData((tree,), 0, 759, 7 * GIB), 140)
    assert "read at step 55, 704 steps ago" in shown
    assert "never all there at once, so the total (7.84 GiB) exceeds the peak (7.00 GiB)." in " ".join(shown.split())
    assert "can exceed the peak (8.00 GiB)" in " ".join(shown_at(LayersData((tree,), 0, 759, 8 * GIB), 80).split())
    assert "read at step 55\n" in shown_at(LayersData((tree,), 0, 55, None))
    assert "ago" not in shown_at(LayersData((tree,), 0, 55, None))


def test_a_low_screen_has_only_the_title_above_the_columns() -> None:
    tree = net_of(*(block(number) for number in range(16)))
    assert "is in blocks.0–15" in shown_at(LayersData((tree,), 0), height=TALL)
    assert "is in blocks.0–15" not in shown_at(LayersData((tree,), 0), height=TALL - 1)
    assert TALL == 16, "20 rows, the lowest screen with a header, an answer of two rows and the keys"


def test_when_it_was_read_has_at_most_three_rows() -> None:
    layers = LayersData((net_of(*(block(number) for number in range(16))),), 0, 759, GIB)
    assert "as the step ended" in " ".join(shown_at(layers, 60).split())
    assert "as forward ended" not in shown_at(layers, 44)


def test_an_open_row_has_a_bar_too() -> None:
    lines = shown_at(LayersData((net_of(*(block(number) for number in range(16))),), 0)).splitlines()
    assert all("█" in line for line in lines if line.startswith((" ▾ Net", "   ▾ blocks")))
    assert sum("▾" in line and "█" in line for line in lines) == 2


@pytest.mark.parametrize("wanted", ["no such", ""])
def test_a_filter_without_a_hit_describes_nothing(wanted: str) -> None:
    shown = shown_at(LayersData((NET,), 0), wanted=wanted)
    assert ("0 of 10 modules have “no such”" in shown) is bool(wanted)
    assert ("No module has it" in shown) is bool(wanted)
    assert ("as forward ended" in shown) is not bool(wanted)
    assert (" B" in shown or "the whole model" in shown or "together" in shown) is not bool(wanted)


def test_repeats_are_explained_to_the_byte() -> None:
    tree = net_of(*(block(number) for number in range(16)))
    row = rows_of((tree,), LayerView(opened_at_first((tree,), 30))).rows[3]
    said = explanation(row, tree)
    assert said[0].startswith("blocks.0 to blocks.15: 16 modules that agree to the digits shown")
    assert said[1] == "together 8,388,608,000 B = weights 3,355,443,200 + activations 5,033,164,800"


def test_ascii_has_no_other_sign() -> None:
    tree = net_of(*(block(number) for number in range(16)))
    for room in (80, 120):
        assert shown_at(LayersData((tree,), 0, 759, GIB), room, glyphs=ASCII).isascii()


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


async def test_keys_open_sort_and_filter(app_of, a_run, settled) -> None:
    app = app_of(a_run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        table = app.screen.query_one(LayerTable)
        assert "222 modules" in text_of(app)
        await pilot.press("down", "down", "down", "down")
        assert "0–23: 24 × 1.03 GiB" in text_of(app)
        assert "91.2 % is in blocks.0–23: 24 × 1.03 GiB, of which 384.1 MiB optimizer" in text_of(app)
        assert "blocks.0–23  × 24, 1.03 GiB each, 24.8 GiB together" in text_of(app)
        await pilot.press("enter", "down")
        assert table.here.layer.path == "blocks.0"
        await pilot.press("right")
        assert table.here.open
        await pilot.press("left", "left", "enter", "left")
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
        head = table._first_y - 1
        await pilot.click(LayerTable, offset=(x, head))
        assert table.choice.order == "total"
        await pilot.click(LayerTable, offset=(5, head + 3))
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
