"""Trees: every value of the format comes back as it was, and everything else is refused by its path."""

from __future__ import annotations

import collections
import enum
import json
import math
import re
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.errors import CorruptionError, SaveError
from incremental_ckpt.format.sealed import MAX_DEPTH, parse_json, seal
from incremental_ckpt.format.tree import MAX_TREE_DEPTH, from_tree, to_tree

KEY = "data/00000001-0123456789abcdef/rank-00000.json"


class Tensor:
    """Stands for a tensor of some framework; equal to itself only."""


def as_tensor(value: object) -> object | None:
    return value if isinstance(value, Tensor) else None


def make(tag: str, value: Any) -> object:
    return (tag, value)


def written(value: object) -> tuple[Any, list[object]]:
    tree, tensors = to_tree(value, path="state", as_tensor=as_tensor)
    return json.loads(json.dumps(tree, allow_nan=False)), tensors


def again(value: object) -> Any:
    tree, tensors = written(value)
    return from_tree(tree, tensors, key=KEY, make=make)


def spelled(value: Any) -> str:
    """The same text for what is equal in values, types, order of dicts and signs of zeros."""
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"{kind}({', '.join(map(spelled, value))})"
    if isinstance(value, dict):
        return f"{kind}{spelled(list(value.items()))}"
    if isinstance(value, (set, frozenset)):
        return f"{kind}{sorted(map(spelled, value))}"
    return f"{kind} {value!r}"


HASHABLE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**80), 2**80),
        st.floats(allow_nan=False),
        st.text(max_size=4),
        st.sampled_from(["$", "$int", "$tensor", "\ud800", 'a"\\[{']),
        st.binary(max_size=4),
        st.complex_numbers(allow_nan=False),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    HASHABLE | st.floats(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict),
        st.sets(HASHABLE, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, database=None)
@given(VALUES)
def test_values_come_back_as_they_were(value: object) -> None:
    assert spelled(again(value)) == spelled(value)


@pytest.mark.parametrize(
    ("value", "tree"),
    [
        (None, None),
        (True, True),
        ("text", "text"),
        (-0.0, -0.0),
        (0.1, 0.1),
        (2**53, 2**53),
        (-(2**53), -(2**53)),
        (2**53 + 1, {"$int": "9007199254740993"}),
        (-(2**64), {"$int": "-18446744073709551616"}),
        (math.nan, {"$float": "nan"}),
        (math.inf, {"$float": "inf"}),
        (-math.inf, {"$float": "-inf"}),
        (complex(1, math.nan), {"$complex": [1.0, {"$float": "nan"}]}),
        (b"\x00\xff", {"$bytes": "AP8="}),
        ([1, "a", [2.5]], [1, "a", [2.5]]),
        ((1, (2,)), {"$tuple": [1, {"$tuple": [2]}]}),
        ({"b", "a"}, {"$set": ["a", "b"]}),
        (frozenset({2, 1}), {"$frozenset": [1, 2]}),
        ({"b": 1, "a": {}}, {"b": 1, "a": {}}),
        ({}, {}),
        ({1: "x", (2, 3): None}, {"$dict": [[1, "x"], [{"$tuple": [2, 3]}, None]]}),
        ({"$int": "5"}, {"$dict": [["$int", "5"]]}),
        ({"a": 1, "$": 2}, {"$dict": [["a", 1], ["$", 2]]}),
        (OrderedDict(b=1, a=2), {"$ordereddict": [["b", 1], ["a", 2]]}),
        ([2**60, 1], [{"$int": str(2**60)}, 1]),
        ([1.0, math.inf], [1.0, {"$float": "inf"}]),
    ],
)
def test_each_kind_of_value_is_written_as_the_format_says(value: object, tree: object) -> None:
    assert spelled(written(value)[0]) == spelled(tree)
    assert spelled(again(value)) == spelled(value)


def test_sets_are_written_in_one_order_whatever_their_hashes() -> None:
    texts = [f"{number:03}" for number in range(50)]
    for kind in (set, frozenset):
        assert written(kind(reversed(texts)))[0] == {f"${kind.__name__}": texts}


def test_tied_tensors_and_arrays_have_one_index_and_are_tied_again() -> None:
    tensor, other, array = Tensor(), Tensor(), np.arange(3)
    value = {"a": tensor, "b": [tensor, other], "c": array, "d": (array,)}
    tree, tensors = written(value)
    assert tree["b"] == [{"$tensor": 0}, {"$tensor": 1}]
    assert (tree["a"], tree["c"], tree["d"]) == ({"$tensor": 0}, {"$ndarray": 2}, {"$tuple": [{"$ndarray": 2}]})
    assert tensors[:2] == [tensor, other]
    read: Any = from_tree(tree, tensors, key=KEY, make=make)
    assert read["a"] is read["b"][0] is tensor
    assert read["c"] is read["d"][0]


def test_tokens_take_the_place_of_tensors() -> None:
    tensor = Tensor()
    tree, tokens = to_tree([tensor, tensor], path="state", as_tensor=lambda value: ("token of", value))
    assert (tree, tokens) == ([{"$tensor": 0}, {"$tensor": 0}], [("token of", tensor)])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.arange(10, dtype=np.uint16)[::-2],
        np.arange(4, dtype=">i4"),
        np.array(3.5),
        np.zeros((0, 3), np.bool_),
        np.array([1 + 2j]),
    ],
    ids=["plain", "transposed", "strided", "big-endian", "no dimensions", "empty", "complex"],
)
def test_arrays_come_back_and_are_handed_over_in_little_endian_c_order(array: np.ndarray[Any, Any]) -> None:
    tree, (token,) = written(array)
    assert tree == {"$ndarray": 0}
    assert isinstance(token, np.ndarray)
    assert token.flags.c_contiguous
    assert token.dtype == array.dtype.newbyteorder("<")
    assert token.shape == array.shape
    np.testing.assert_array_equal(again(array), array)


@pytest.mark.parametrize("scalar", [np.float64(0.5), np.float32("nan"), np.int8(-3), np.bool_(True), np.uint64(2**63)])
def test_numpy_scalars_come_back_with_their_dtype(scalar: np.generic) -> None:
    tree, (token,) = written({"x": scalar})
    assert tree == {"x": {"$scalar": 0}}
    assert isinstance(token, np.ndarray)
    assert token.shape == ()
    read = again(scalar)
    assert type(read) is type(scalar)
    np.testing.assert_array_equal(read, scalar)


def test_what_is_torchs_is_recognized_by_name_and_built_by_the_caller() -> None:
    size = type("Size", (tuple,), {"__module__": "torch"})
    dtype = type("dtype", (), {"__module__": "torch", "__repr__": lambda self: "torch.float32"})
    device = type("device", (), {"__module__": "torch", "__repr__": lambda self: "cuda:1"})
    value = [size((2, 3)), dtype(), device()]
    assert written(value)[0] == [{"$size": [2, 3]}, {"$dtype": "float32"}, {"$device": "cuda:1"}]
    assert again(value) == [("$size", [2, 3]), ("$dtype", "float32"), ("$device", "cuda:1")]


class Foo:
    pass


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")
CYCLE: list[object] = [1]
CYCLE.append({"self": CYCLE})


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"reader": {"buffer": [0, 1, 2, Foo()]}}, "state['reader']['buffer'][3]"),
        ({1: (Foo(),)}, "state[1][0]"),
        ({(1, 2): Foo()}, "state[(1, 2)]"),
        (OrderedDict(a=Foo()), "state['a']"),
        ({"a": {Foo()}}, "state['a'][0]"),
        ({Foo(): 1}, "state key Foo"),
        (Colour.RED, "state"),
        ([Point(1, 2)], "state[0]"),
        ([defaultdict(list)], "state[0]"),
        ([collections.Counter()], "state[0]"),
        ([bytearray(b"a")], "state[0]"),
        ([range(3)], "state[0]"),
        ([len], "state[0]"),
        ([Foo], "state[0]"),
        ([object()], "state[0]"),
        ([10**6000], "state[0]"),
        ([np.array([Foo()])], "state[0]"),
        ([np.array(["text"])], "state[0]"),
        ([np.datetime64("2026-01-31")], "state[0]"),
        ([np.str_("text")], "state[0]"),
        ([np.ma.masked_array([1], mask=[True])], "state[0]"),
        ([np.longdouble(1)], "state[0]"),
        ([np.zeros(1, [("a", "i4")])], "state[0]"),
        (CYCLE, "state[1]['self']"),
    ],
    ids=range(24),
)
def test_anything_else_is_an_error_that_names_its_path(value: object, path: str) -> None:
    with pytest.raises(SaveError) as caught:
        written(value)
    assert str(caught.value).startswith((path + ":", path + " "))


def test_one_list_met_twice_is_no_cycle() -> None:
    shared = [1]
    assert again([shared, shared, {"a": shared}]) == [[1], [1], {"a": [1]}]


NESTINGS: list[Callable[[object], object]] = [
    lambda inner: [inner],
    lambda inner: (inner,),
    lambda inner: {"a": inner},
    lambda inner: {1: inner},
    lambda inner: OrderedDict(a=inner),
]
LEAVES: list[object] = [1, [], {}, (), set(), 2**60, math.nan, 1j, b"", Tensor(), np.zeros(1), {1: 1}, {"a": 1}]


@pytest.mark.parametrize("leaf", LEAVES, ids=range(len(LEAVES)))
@pytest.mark.parametrize("nest", NESTINGS, ids=["list", "tuple", "dict", "pairs", "ordereddict"])
def test_what_is_written_is_never_too_deep_to_be_read(nest: Callable[[object], object], leaf: object) -> None:
    value, depths = leaf, 0
    while True:
        try:
            tree, tensors = to_tree(value, path="state", as_tensor=as_tensor)
        except SaveError as error:
            assert "too deep" in str(error)
            break
        raw = seal({"state": [{"name": "reader", "tree": tree}]})
        read = parse_json(raw)["state"][0]["tree"]
        from_tree(read, tensors, key=KEY, make=make)
        value, depths = nest(value), depths + 1
    assert depths >= MAX_TREE_DEPTH // 3 - 1
    assert depths <= MAX_TREE_DEPTH + 1


def deep(levels: int) -> object:
    tree: object = 1
    for _ in range(levels):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        {"$int": 5},
        {"$int": "5.0"},
        {"$int": "0x5"},
        {"$int": "05"},
        {"$int": "-0"},
        {"$int": " 5"},
        {"$int": "5\n"},
        {"$int": "1_000"},
        {"$int": "٥"},
        {"$int": "9" * 5000},
        {"$float": "NaN"},
        {"$float": 1.0},
        {"$float": ["nan"]},
        math.inf,
        [1.0, math.nan],
        {"$complex": [1.0]},
        {"$complex": [1.0, "2"]},
        {"$complex": [1.0, 2.0, 3.0]},
        {"$complex": 1.0},
        {"$bytes": "A"},
        {"$bytes": "AP8=\n"},
        {"$bytes": "ä"},
        {"$bytes": [0]},
        {"$tuple": {}},
        {"$tuple": "ab"},
        {"$set": [1, 1]},
        {"$set": [[]]},
        {"$frozenset": [{}]},
        {"$dict": [[1]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": ["ab"]},
        {"$dict": {"a": 1}},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[], 2]]},
        {"$ordereddict": [[{"$tuple": [[]]}, 2]]},
        {"$dict": [[{"$ndarray": 0}, 2]]},
        {"$tensor": 2},
        {"$tensor": -1},
        {"$tensor": True},
        {"$tensor": "0"},
        {"$tensor": 10**30},
        {"$ndarray": 2},
        {"$scalar": 0},
        {"$scalar": None},
        {"$size": [-1]},
        {"$size": [1.0]},
        {"$size": 3},
        {"$size": [{"$tuple": []}]},
        {"$dtype": 3},
        {"$device": ["cpu"]},
        {"$device": "refused by make"},
        {"$unknown": 1},
        {"$": 1},
        {"$tensor": 0, "a": 1},
        {"a": 1, "$int": "5"},
        {"$int": "5", "$float": "nan"},
        deep(MAX_DEPTH + 1),
        (1, 2),
        {"a": object()},
    ],
    ids=lambda tree: re.sub(r" at 0x\w+", "", repr(tree))[:40],
)
def test_a_malformed_tree_is_corrupt(tree: object) -> None:
    def refuse(tag: str, value: Any) -> object:
        if value == "refused by make":
            raise RuntimeError("no such device")
        return value

    with pytest.raises(CorruptionError) as caught:
        from_tree({"reader": tree}, [np.arange(3), np.array(1)], key=KEY, make=refuse)
    assert caught.value.key == KEY
    assert len(str(caught.value)) < 500


def test_a_tree_read_shares_no_container_with_what_was_parsed() -> None:
    tree = {"a": [1, 2], "b": {"c": []}}
    read: Any = from_tree(tree, [], key=KEY, make=make)
    read["a"].append(3)
    read["b"]["c"].append(3)
    assert tree == {"a": [1, 2], "b": {"c": []}}


TAGS = ["$int", "$float", "$complex", "$bytes", "$tuple", "$set", "$frozenset", "$dict", "$ordereddict"]
TAGS += ["$tensor", "$ndarray", "$scalar", "$size", "$dtype"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([0, 1, "nan", "5"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=2),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
        st.tuples(st.sampled_from(TAGS), inner).map(lambda pair: dict([pair])),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, database=None)
@given(JSON)
def test_any_json_is_a_tree_or_corrupt(tree: object) -> None:
    tensors: list[object] = [np.array(1.5), np.arange(2)]
    try:
        value = from_tree(tree, tensors, key=KEY, make=make)
    except CorruptionError:
        return
    to_tree(value, path="state", as_tensor=as_tensor)
