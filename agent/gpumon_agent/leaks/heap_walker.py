"""Walks from named roots to the tensors they hold. Long: it stops and resumes anywhere, so its cursor is one class.

It walks in time slices and keeps no object alive between them.

Model. Depth-first search from roots (a module's globals, a frame's locals, an object). The cursor is a stack of levels.
Within a slice a level holds its object; between slices only the object's id and its position or key in the level above.
If the object is no longer there, the walk continues one level up. Containers are read in chunks by position, never
copied whole. An object with a single reference is not marked as visited, because no second path can lead to it. Under a
depth limit, an object met again closer to a root is walked again, so rounds with growing limits find the shortest name
first.

It never calls `gc.get_objects` or `gc.get_referrers`, and `gc.get_referents` only where no cheaper way exists.

Cost: 0.3 to 1 µs per object; benchmarks/census.py.
Known limitations. C objects that do not report their references to the collector are opaque. Sets are read up to
`SET_MAX`. Changes between two slices may be missed until the next census: of an object that each step makes anew, only
what one slice reads is seen.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from types import ModuleType
from typing import Any, NamedTuple

from gpumon_agent import naming
from gpumon_agent.frames import Place
from gpumon_agent.guard import pass_on
from gpumon_agent.leaks import bounded_containers, object_children
from gpumon_agent.leaks.object_children import (
    ATOM,
    BUILTIN,
    CLASS,
    DEQUE,
    DICT,
    FUNCTION,
    MODULE,
    PAIRS,
    REFERENTS,
    SEQUENCE,
    SET,
    TENSOR,
)
from gpumon_agent.thread_clock import ThreadClock

CHUNK = 16  # children read at once, and looked at between two clock checks
DEPTH_MAX = 160  # resuming costs 1 µs per level
BIG = 4_096  # entries: larger dicts are read with PyDict_Next, whose cursor resumes without skipping entries
SET_MAX = 10_000
GLANCE = 512  # newest entries of a large sequence that a depth-limited round reads first
_KEY = object()
_ITEM, _NAMED, _BARE = range(3)  # how names show a dict's keys: ['key'], .key, not at all

_next: Any = ctypes.pythonapi.PyDict_Next
_next.restype = ctypes.c_int
_next.argtypes = [
    ctypes.py_object,
    ctypes.POINTER(ctypes.c_ssize_t),
    ctypes.POINTER(ctypes.py_object),
    ctypes.POINTER(ctypes.py_object),
]


class Root(NamedTuple):
    """Where a walk begins: a function that finds the object again in each slice, and the object's name."""

    find: Callable[[], Any]
    prefix: str = ""  # before the first label: "metrics."
    function: str | None = None  # whose local variables these are
    kind: str = "global"
    named: bool = False  # a namespace: its dict's keys are variables
    own: str = ""  # the class name that replaces `self`
    module: str | None = None  # whose globals these are
    where: Callable[[str], Place | None] = lambda _: None  # the line that first gave the variable a value


class _Level:
    """One object on the path from the root. Fields marked "in a slice" are None between slices."""

    cursor = 0  # of the next chunk
    end = -1  # of a sequence: where to stop; -1: at its end
    glances = False  # of a large sequence, read the newest entries first, the others only if those hold finds
    full = False
    attributed = False
    chunk: Any = None  # in a slice
    edges: Any = None  # in a slice: keys, or labels and tags
    places: Any = None  # in a slice: cursors of a big dict's entries
    items: Any = None  # in a slice: an iterator
    index = 0  # next within the chunk
    base = 0  # cursor of the chunk's first entry
    alike: Any = None  # the part of its position that goes into its name
    holder: object_children.Name | None = None  # shared by all tensors that are direct elements

    def __init__(self, obj: Any, how: int, at: int, key: Any, label: str | None, tag: str, style: int) -> None:
        self.obj = obj  # in a slice
        self.identity = id(obj)
        self.how = how
        self.at = at  # position in the level above
        self.key = key  # or its key there, if a string or an int; _KEY: it is itself a key
        self.label = label  # None: made from the level above
        self.tag = tag
        self.style = style


class HeapWalker:
    """The walk of one census. `found` is called with every tensor met and with this walker, which can name it;
    it returns whether the tensor counts as a find."""

    def __init__(
        self, found: Callable[[Any, HeapWalker], bool], files: object_children.Files, of_module: Callable[[str], Root]
    ) -> None:
        self.objects = 0
        self._of_module = of_module
        self._spaces: set[int] = set()  # namespaces that are roots, by id
        self._met: set[object] = set()  # names of the user's modules that are roots
        self._found = found
        self._files = files
        self._roots: list[Root | str] = []  # a str names a module
        self._root: Root = Root(lambda: None)
        self._levels: list[_Level] = []
        self._visited: dict[int, int] = {}
        self._modules: list[str] = []  # the user's modules that were reached, in any round
        self._how: dict[type, int] = {}  # of types that are not the user's
        self._users_how: dict[int, tuple[weakref.ref[type], int]] = {}
        self._clock = ThreadClock(0)
        self._once_more = False
        self._holders: dict[Any, object_children.Name] = {}  # of containers, by id, or by id and the path below
        self._named: dict[Any, object_children.Name] = {}  # of positions with the same name, below one root
        self._sources: dict[str, list[str]] = {}  # by file
        self._stems: dict[int, Counter[str]] = {}  # of namespaces, by id: names without their trailing digits
        self._lines: dict[tuple[str, int, str], int | None] = {}
        self._limit = DEPTH_MAX
        self._installed = False
        self._tensor_label: str | None = None
        self._tensor_tag = ""
        self._tensor_edge: Any = None

    def begin(self, roots: list[Root | str], *, limit: int, installed: bool = False, again: bool = True) -> None:
        """Starts a round. `limit`: maximum depth. `installed`: also walk the classes of installed packages.

        `again` False: skip objects that earlier rounds have visited.
        """
        self._met = {root.module for root in roots if isinstance(root, Root)} | (set() if again else self._met)
        self._spaces |= {id(root.find()) for root in roots if isinstance(root, Root) and root.named}
        met = [name for name in self._modules if name not in self._met and name not in roots] if again else []
        self._met.update(met)
        self._roots = [*met, *roots[::-1]]
        self._levels = []
        self._stems = {}
        self._limit = limit
        self._installed = installed
        if again:
            self._visited = {}

    def run(self, clock: ThreadClock, enough: Callable[[], bool]) -> bool:
        """Walks until the clock is over. True: the round is complete. `enough` is called before each root."""
        levels = self._levels
        self._clock, self._once_more = clock, False
        self._resume()
        try:
            while levels or self._roots:
                if levels:
                    self._advance(levels[-1])
                elif enough():
                    self._roots.clear()
                else:
                    self._enter()
                if self._once_more or clock.over():  # checked last: resuming may take all of a short slice
                    break
            return not levels and not self._roots
        finally:
            self._suspend()

    # ------------------------------------------------------------------------------------------------------ the stack

    def _enter(self) -> None:
        next_ = self._roots.pop()
        self._named.clear()
        self._root = root = self._of_module(next_) if isinstance(next_, str) else next_
        obj = root.find()
        if obj is None:
            return
        kind = PAIRS if type(obj) in object_children.PAIRED else self._kind(type(obj))
        self._visited[_BUILTINS] = 0
        if kind in (ATOM, TENSOR):
            return
        style = _NAMED if root.named else _ITEM
        self._levels.append(_Level(obj, kind, 0, None, "", "", style))
        self._visited[id(obj)] = 0

    def _suspend(self) -> None:
        self._tensor_edge = None
        for level in self._levels:
            level.cursor = self._position(level)
            level.obj = level.chunk = level.edges = level.items = level.places = None
            level.index = 0

    @staticmethod
    def _position(level: _Level) -> int:
        if level.chunk is None:
            return level.cursor
        if level.places is not None:
            return int(level.places[level.index]) if level.index < len(level.places) else level.cursor
        return level.base + level.index if level.index < len(level.chunk) else level.cursor

    def _resume(self) -> None:
        levels = self._levels
        if not levels:
            return
        above: _Level | None = None
        for depth, level in enumerate(levels):
            obj = self._root.find() if above is None else self._again(above, level)
            if obj is None or (id(obj) != level.identity and not self._replaced(obj, level)):
                for lost in levels[depth:]:  # not fully walked: another path may lead there
                    self._visited.pop(lost.identity, None)
                del levels[depth:]
                return
            level.obj = obj
            above = level

    def _replaced(self, obj: Any, level: _Level) -> bool:
        """Whether `obj` is a longer copy of the level's list or tuple (`values += (loss,)`): the walk goes on in it."""
        if level.how != SEQUENCE or not isinstance(obj, (list, tuple)) or len(obj) < level.cursor:
            return False
        self._visited[id(obj)] = self._visited.pop(level.identity, 0)
        level.identity = id(obj)
        return True

    def _again(self, above: _Level, level: _Level) -> Any:
        """The object of `level`, looked up in the level above; possibly another object, or None."""
        obj, at = above.obj, level.at
        try:
            if at == _ATTRIBUTES:
                return naming.instance_dict(obj)
            if above.how == DICT:
                if type(level.key) in (str, int):
                    return dict.get(obj, level.key)
                entry = _entry(obj, at) if len(obj) > BIG else next(islice(dict.items(obj), at, None), None)
                return None if entry is None else entry[level.key is not _KEY]
            if above.how == SEQUENCE:
                return list.__getitem__(obj, at) if isinstance(obj, list) else tuple.__getitem__(obj, at)
            if above.how == DEQUE:
                return obj[at]
            if above.how == SET:
                return next(islice(obj, at, None), None)
            known = object_children.again(obj, at, level.identity) if above.how in (PAIRS, CLASS) else None
            if known is not None:
                return known
            children = self._children(above)[0]
            if at < len(children) and id(children[at]) == level.identity:
                return children[at]
            return next((each for each in children if id(each) == level.identity), None)
        except (IndexError, RuntimeError, KeyError) as error:
            pass_on(error)
            return None

    # --------------------------------------------------------------------------------------------------- one chunk on

    def _advance(self, level: _Level) -> None:
        """Visits the level's next children, until one of them is pushed as a level."""
        if level.chunk is None or level.index >= len(level.chunk):
            try:
                more = self._fill(level)
            except (RuntimeError, IndexError) as error:  # it changed while it was read
                pass_on(error)
                more = False
            if not more:
                if not self._attributes(level):
                    self._levels.pop()
                return
        chunk, edges = level.chunk, level.edges
        kinds = self._how
        visited = self._visited
        depth = len(self._levels)
        index = start = level.index
        count = min(len(chunk), index + CHUNK)
        shallow = self._limit < DEPTH_MAX
        while index < count:
            child = chunk[index]
            index += 1
            kind = kinds.get(type(child))
            if kind is None:
                kind = self._kind(type(child))
            if kind == ATOM:
                continue
            level.index = index
            if kind == TENSOR:
                self._tensor(child, level, None if edges is None else edges[index - 1])
                if self._once_more:
                    index -= 1
                    break
                if self._levels[-1] is not level or self._clock.over():
                    break
                continue
            if kind >= FUNCTION:
                if kind == MODULE:
                    self._meet(vars(child).get("__name__"))
                    continue
                if kind == BUILTIN:
                    held = child.__self__
                    if held is None or type(held) is ModuleType:
                        continue
                elif self._files.users_file(child.__code__.co_filename):
                    self._meet(child.__globals__.get("__name__"))
                    bare = child.__closure__ is child.__defaults__ is child.__kwdefaults__ is None
                    if bare and not object_children.has_attributes(child):
                        continue
                elif child.__closure__ is child.__defaults__ is child.__kwdefaults__ is None:
                    continue
                kind = PAIRS
            if depth >= self._limit:
                continue
            if sys.getrefcount(child) > _SINGLE:
                before = visited.get(id(child))
                if before is not None and before <= depth:
                    continue
                visited[id(child)] = depth if shallow else 0
            if self._push(child, kind, level, index - 1):
                break
        level.index = index
        self.objects += index - start

    def _attributes(self, level: _Level) -> bool:
        """Pushes the instance dict of a container's subclass, after its entries. False: there is none to walk."""
        if (
            level.attributed
            or level.how not in (SEQUENCE, DICT, DEQUE, SET)
            or type(level.obj) in object_children.PLAIN
        ):
            return False
        level.attributed = True
        values = naming.instance_dict(level.obj)
        if not values or len(self._levels) >= self._limit:
            return False
        self._levels.append(_Level(values, DICT, _ATTRIBUTES, None, "", "", _NAMED))
        return True

    def _fill(self, level: _Level) -> bool:
        """The next chunk. False: there is none."""
        obj, kind = level.obj, level.how
        if level.chunk is not None and (kind in (PAIRS, REFERENTS, CLASS, TENSOR)):
            return False
        if kind in (SEQUENCE, DEQUE):
            return self._fill_from_sequence(level)
        if kind == DICT:
            return self._fill_from_dict(level)
        if kind == SET:
            if level.items is None:
                level.items = iter(obj)
                if level.cursor:
                    next(islice(level.items, level.cursor - 1, None), None)
            level.chunk, level.edges = list(islice(level.items, CHUNK)), None
            level.base, level.cursor = level.cursor, level.cursor + len(level.chunk)
            if level.cursor > SET_MAX:
                return False
        else:
            level.chunk, level.edges = self._children(level)
            level.base, level.index, level.cursor = 0, level.cursor, len(level.chunk)
            return bool(level.index < len(level.chunk))
        level.index = 0
        return bool(level.chunk)

    def _fill_from_sequence(self, level: _Level) -> bool:
        obj = level.obj
        kind: Any = list if isinstance(obj, list) else tuple if isinstance(obj, tuple) else deque
        size = kind.__len__(obj)
        if level.end < 0 and size > 2 * GLANCE and self._limit < DEPTH_MAX:
            level.glances = True
            level.cursor = level.end = size - GLANCE
        begin = level.cursor
        end = min(begin + CHUNK, size if level.glances or level.end < 0 else level.end)
        if begin >= end and level.glances and level.full:
            level.glances = False
            begin, end = 0, min(CHUNK, level.end)
        if begin >= end:
            return False
        if kind is deque:
            level.chunk = [obj[at] for at in range(begin, end)]
        else:
            level.chunk = kind.__getitem__(obj, slice(begin, end))
        level.base, level.cursor, level.edges, level.index = begin, end, None, 0
        return True

    def _fill_from_dict(self, level: _Level) -> bool:
        obj = level.obj
        if len(obj) > BIG and self._limit < DEPTH_MAX and not level.full:
            level.full = self._kind(type(next(reversed(dict.values(obj)), None))) == TENSOR
            if not level.full:
                return False
        keys: list[Any] = []
        values: list[Any] = []
        if len(obj) > BIG:
            places: list[int] = []
            cursor = ctypes.c_ssize_t(level.cursor)
            key, value = ctypes.py_object(), ctypes.py_object()
            to_cursor, to_key, to_value = ctypes.byref(cursor), ctypes.byref(key), ctypes.byref(value)
            while len(places) < CHUNK:
                place = cursor.value
                if not _next(obj, to_cursor, to_key, to_value):
                    break
                places.append(place)
                keys.append(key.value)
                values.append(value.value)
            level.base, level.cursor, level.places = level.cursor, cursor.value, places
        else:
            if level.items is None:
                level.items = iter(dict.items(obj))
                if level.cursor:
                    next(islice(level.items, level.cursor - 1, None), None)
            for name, held in islice(level.items, CHUNK):
                keys.append(name)
                values.append(held)
            level.base, level.cursor, level.places = level.cursor, level.cursor + len(keys), None
        level.index = 0
        if not keys:
            level.chunk = values
            return False
        self._keys(level, keys)
        level.chunk, level.edges = values, keys
        return True

    def _keys(self, level: _Level, keys: list[Any]) -> None:
        """Tensors among a dict's keys, directly or in a tuple (such as a cache keyed by arguments)."""
        for key in keys:
            kind = type(key)
            if kind is str or kind is int:
                continue
            for each in key[:16] if issubclass(kind, tuple) else (key,):
                if self._kind(type(each)) == TENSOR:
                    self._tensor(each, level, _KEY)

    def _children(self, level: _Level) -> tuple[list[Any], list[Any] | None]:
        """Children of a level that is not a container, and the (label, tag) of each if known.

        For a class, which may have a thousand, only attribute names: building labels would be slow."""
        obj = level.obj
        if level.how == REFERENTS:
            return gc.get_referents(obj), None
        if type(obj) is object_children.CACHE:
            return object_children.cached(obj)
        if level.how == CLASS:
            return [*vars(obj).values()], [*vars(obj)]
        labelled = object_children.tensor_children(obj) if level.how == TENSOR else object_children.children(obj)
        return [child for _, _, child in labelled], [(label, tag) for label, tag, _ in labelled]

    def _kind(self, kind: type) -> int:
        known = self._users_how.get(id(kind))
        if known is not None and known[0]() is kind:
            return known[1]
        found = object_children.how(kind)
        module = getattr(kind, "__module__", None)
        if isinstance(module, str) and not self._files.users_module(module):
            self._how[kind] = found
        else:  # the user's classes can be freed like any other object
            self._users_how[id(kind)] = weakref.ref(kind), found
        return found

    def _meet(self, name: Any) -> None:
        """Adds a user's module that the walk has reached as a root, so `sys.modules` need not be scanned."""
        if name not in self._met and self._files.users_module(name):
            self._met.add(name)
            if name not in self._modules:
                self._modules.append(name)
            self._roots.append(self._of_module(name))

    def _push(self, child: Any, kind: int, level: _Level, index: int) -> bool:
        if kind == CLASS:
            module = getattr(child, "__module__", None)
            if self._files.users_module(module):
                self._meet(module)
            elif not self._installed:
                return False
        elif type(child) in _UNTRACKED_IF_EMPTY and not gc.is_tracked(child):
            return False  # untracked: nothing in it can hold references
        elif kind == DICT and id(child) in self._spaces:
            return False  # globals() in a variable: the plain variable names are better
        edge = None if level.edges is None else level.edges[index]
        label: str | None = None
        tag = ""
        style = _ITEM
        key = None
        how = level.how
        if how == CLASS:
            label, tag = f".{edge}", "class"
        elif how in (PAIRS, TENSOR):
            assert edge is not None
            label, tag = edge
            if label == "" and kind == DICT:  # an exception's own attributes
                style = _NAMED
        elif how == DICT:
            key = edge if type(edge) in (str, int) else None
            if level.style == _NAMED and type(edge) is str:
                above = self._levels[-2].obj if len(self._levels) > 1 else None
                label, tag = naming.dict_words(above, edge)
                if above is None:
                    tag = ""  # a variable
                if kind == DICT and tag == "hook":
                    style = _BARE
                elif kind == DICT and label == "":
                    style = _NAMED
            elif level.style == _BARE:
                label = object_children.among(len(level.obj))
        elif how == REFERENTS and kind == DICT and type(child) is dict and naming.instance_dict(level.obj) is child:
            label, style = "", _NAMED
        at = level.base + index if level.places is None else level.places[index]
        new = _Level(child, kind, at, key, label, tag, style)
        starred = _starred(level)
        place = None if starred else (at, key)
        new.alike = kind, place, label, type(child) if kind == REFERENTS else None
        self._levels.append(new)
        return True

    def _tensor(self, tensor: Any, level: _Level, edge: Any) -> None:
        self._tensor_edge = edge
        self._tensor_label = None
        if self._found(tensor, self):
            for each in self._levels:  # it holds finds: read all of it
                each.full = each.full or each.glances
        depth = len(self._levels)
        if edge is _KEY or depth >= self._limit or self._visited.get(id(tensor), DEPTH_MAX) <= depth:
            return
        hooked = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
        if hooked or object_children.attributes(tensor):
            self._visited[id(tensor)] = depth
            self._push(tensor, TENSOR, level, level.index - 1)

    # ---------------------------------------------------------------------------------------------------------- names

    def name(self) -> object_children.Name:
        """The name of the holder of the tensor that `found` is being called with."""
        level = self._levels[-1]
        steady = level.how in _CONTAINERS or (level.how == DICT and len(level.obj) > _NAMED_KEYS_MAX)
        if steady and _fixed(level.obj):
            steady = False  # each entry has its own name
        if steady:
            known = level.holder or self._holders.get(level.identity)
            if known is not None:  # reached before by another path: keep that name for its new entries
                level.holder = known
                return known
        edge = self._tensor_edge
        if type(edge) not in (str, int):
            edge = edge[0] if level.edges is not None and level.how in (PAIRS, TENSOR) else edge is _KEY
        entry = None if _starred(level) else (level.base + level.index - 1, edge)
        alike = (*(each.alike for each in self._levels), entry or edge is True)
        holder = self._named.get(alike)
        if holder is None:
            within = self._within(entry)
            holder = self._holders.get(within) or self._tell()
            if len(self._named) < _HOLDERS_MAX:
                self._named[alike] = holder
            if within is not None and len(self._holders) < _HOLDERS_MAX:
                self._holders[within] = holder
        if steady:
            level.holder = holder
            if len(self._holders) < _HOLDERS_MAX:
                self._holders[level.identity] = holder
        return holder

    def _within(self, entry: object) -> object:
        """The innermost container whose entries share a name, plus the path below it. It identifies the holder when
        another name leads to the same container."""
        way: list[object] = [entry]
        for each in reversed(self._levels):
            if each.how in _CONTAINERS and not _fixed(each.obj):
                return each.identity, *way
            way.append(each.alike)
        return None

    def _tell(self) -> object_children.Name:
        level = self._levels[-1]
        labels: list[str] = []
        tags: set[str] = set()
        where: Place | None = None
        told_class = False
        for above, each in zip(self._levels, self._levels[1:], strict=False):
            label, tag = self._label(above, each.label, each.tag, each.key, each.obj, each.at)
            labels.append(label)
            tags.add(tag)
            where = self._line_within(above, label) or where
            if each.how == CLASS:
                labels, told_class = [each.obj.__qualname__], True
                tags.clear()
                where = object_children.class_line(each.obj)
        label, tag = self._label(level, None, "", self._tensor_edge, None, level.base + level.index - 1)
        labels.append(label)
        tags.add(tag)
        where = self._line_within(level, label) or where
        root = self._root
        variable = next((each for each in labels if each), "").lstrip(".")
        text = "".join(_shortened(labels))
        if not told_class:
            if root.named or root.function:
                text = text.removeprefix(".")
                if variable == "self" and root.own:
                    text = root.own + text[4:]
            text = root.prefix + text
        kind = next((each for each in _PRIORITY if each in tags), root.kind)
        if kind not in ("bounded", "cache") and self._shortened_by_its_own():
            kind = "trimmed"
        text = text.replace("hook.closure", "hook closure").replace(".cache.keys()", ".cache")
        where = where or root.where(variable) or self._users_class()
        return object_children.Name(text, kind, where, None if told_class else root.function)

    @property
    def spent_ns(self) -> int:
        return self._clock.spent_ns

    def once_more(self) -> None:
        """Ends this slice; the next one begins with the tensor that `found` is being called with."""
        self._once_more = True

    def beside(self) -> Iterator[Any]:
        """The other variables of the function or object that holds the tensor passed to `found`."""
        level = self._levels[-1]
        return iter(()) if level.how in _CONTAINERS else iter(level.chunk)

    def way(self) -> Iterator[Any]:
        """The objects on the path to the tensor passed to `found`, innermost first."""
        return (level.obj for level in reversed(self._levels))

    def _users_class(self) -> Place | None:
        """The line of the innermost user-defined object's class, used if there is no better line."""
        for each in reversed(self._levels):
            if each.how == REFERENTS and self._files.users_module(type(each.obj).__module__):
                return object_children.class_line(type(each.obj))
        return None

    def _shortened_by_its_own(self) -> bool:
        """Whether the outermost growing container is within the length that the user's code trims it to."""
        grows = next(
            (at for at, each in enumerate(self._levels) if at and each.how in _CONTAINERS and _starred(each)), 0
        )
        name = self._levels[grows].key if grows else None
        if not grows:
            return False
        held_by = self._levels[grows - 1]
        owner: Any = None
        if held_by.how == DICT and held_by.style == _NAMED:
            above = self._levels[grows - 2].obj if grows > 1 else None
            owner = above if grows > 1 else held_by.obj
        elif held_by.how == REFERENTS:
            owner, name = held_by.obj, object_children.attribute(held_by.obj, self._levels[grows].obj)
        elif type(held_by.obj) in object_children.FRAMES:
            owner, name = held_by.obj, (self._levels[grows].label or "").lstrip(".")
        if owner is None or not isinstance(name, str) or not name.isidentifier():
            return False
        file, value = object_children.code_around(owner)
        if file is None or not self._files.users_file(file):
            return False
        if file not in self._sources:
            self._sources[file] = bounded_containers.source(file)
        most = bounded_containers.limit(self._sources[file], name, value)
        return most is not None and len(self._levels[grows].obj) <= most + 1

    def _label(self, above: _Level, label: str | None, tag: str, edge: Any, child: Any, at: int) -> tuple[str, str]:
        if label is not None:
            return label, tag
        if above.how in _CONTAINERS:
            if _fixed(above.obj):
                return _entry_of(above.obj, at), ""
            bounded = above.how == DEQUE and above.obj is not None and (above.obj.maxlen or _NO_BOUND) < _NO_BOUND
            return "[*]", "bounded" if bounded else ""
        if above.how == DICT:
            if edge is _KEY:
                return ".keys()[*]", ""
            if above.style == _NAMED and type(edge) is str:
                return f".{self._stem(above, edge)}", "" if above is self._levels[0] else "attribute"
            if above.style == _BARE:
                return "", ""
            if type(edge) is str and len(above.obj) <= _NAMED_KEYS_MAX and len(edge) <= 40:
                return f"[{edge!r}]", ""
            return "[*]", ""
        if above.how == REFERENTS:
            if child is None:
                child = above.chunk[above.index - 1]
            name = object_children.attribute(above.obj, child)
            return (f".{name}", "attribute") if name is not None else (f".<{type(above.obj).__name__}>", "attribute")
        if above.how == CLASS:
            return f".{edge}", "class"
        if isinstance(edge, tuple):
            return edge[0], edge[1]
        return "", ""

    def _stem(self, above: _Level, name: str) -> str:
        """`seen*` for seen17, if many of the namespace's newest names differ only in trailing digits."""
        stem = name.rstrip(_DIGITS)
        if stem == name:
            return name
        stems = self._stems.get(above.identity)
        if stems is None:
            newest = (key for key in islice(reversed(above.obj), GLANCE) if type(key) is str)
            stems = self._stems[above.identity] = Counter(key.rstrip(_DIGITS) for key in newest)
        return f"{stem}*" if stems[stem] >= _NUMBERED else name

    def _line_within(self, above: _Level, label: str) -> Place | None:
        """The line of a frame's local variable; for a function's closures and defaults, its first line."""
        code = object_children.code_of(above.obj)
        if code is None or above is self._levels[0]:
            return None
        line = self.line(code, label.lstrip(".")) if type(above.obj) in object_children.FRAMES else None
        return naming.place(code, line)

    def line(self, code: Any, name: str) -> int | None:
        key = code.co_filename, code.co_firstlineno, name
        if key not in self._lines:
            self._lines[key] = naming.stored_at(code, name)
        return self._lines[key]


def _shortened(labels: Iterable[str]) -> Iterator[str]:
    """Turns a linked list's `.next.next.next` into `.next…`."""
    for label, run in groupby(each for each in labels if each):
        times = len(list(run))
        few = times == 1 or label == "[*]" or (times == 2 and label.endswith("]"))
        yield label * times if few else f"{label}…"


def _starred(level: _Level) -> bool:
    """Whether its entries share the label "[*]"."""
    if level.how in _CONTAINERS:
        return not _fixed(level.obj)
    return level.how == DICT and level.style == _ITEM and len(level.obj) > _NAMED_KEYS_MAX


def _fixed(container: Any) -> bool:
    """Whether a container's entries are labelled by index: of a small tuple or a list of one."""
    if isinstance(container, tuple):
        return tuple.__len__(container) <= _PLACES_MAX
    return isinstance(container, list) and list.__len__(container) == 1


def _entry_of(container: Any, at: int) -> str:
    names = getattr(type(container), "_fields", None)  # a named tuple's
    if isinstance(names, tuple) and at < len(names):
        return f".{names[at]}"
    return f"[{at}]"


_PRIORITY = (
    "bounded", "hook", "cache", "traceback", "generator", "closure", "default", "class", "module", "attribute",
)  # fmt: skip
_UNTRACKED_IF_EMPTY = (tuple, dict)  # exact types: others made in C may be untracked and still hold tensors
_CONTAINERS = (SEQUENCE, DEQUE, SET)
_NAMED_KEYS_MAX = 32
_PLACES_MAX = 8
_DIGITS = "0123456789"
_NUMBERED = 8  # names that differ only in trailing digits: made in a loop
_NO_BOUND = 10_000_000  # entries: this many blocks of the smallest size take 5 GB
_HOLDERS_MAX = 10_000
_BUILTINS = id(vars(builtins))  # every namespace leads there
_ATTRIBUTES: Any = object()  # in place of a position


def _entry(mapping: dict[Any, Any], cursor: int) -> tuple[Any, Any] | None:
    at = ctypes.c_ssize_t(cursor)
    key, value = ctypes.py_object(), ctypes.py_object()
    if not _next(mapping, ctypes.byref(at), ctypes.byref(key), ctypes.byref(value)):
        return None
    return key.value, value.value


def _references_of_a_single() -> int:
    """What `sys.getrefcount` in `_advance` returns for an object that only one container holds."""
    held: list[list[object]] = [[]]
    chunk = held[0:1]
    child = chunk[0]
    return sys.getrefcount(child)


_SINGLE = _references_of_a_single()
