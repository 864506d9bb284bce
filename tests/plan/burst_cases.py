"""Random models for the burst planner's tests: chains, single forks, forks in forks, and any graph."""

from hypothesis import strategies as st

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec
from burstpool.profiling.profile import LayerProfile, Profile

BATCHES = (1, 2, 3, 4, 6, 12)


def layer(
    name: str, inputs: tuple[str, ...], *, seconds: float, fixed_s: float, parameters: int, size: int
) -> LayerProfile:
    """Time grows with the batch from a floor."""
    forward = {batch: fixed_s + seconds * batch for batch in BATCHES}
    return LayerProfile(
        name=name,
        inputs=inputs,
        parameter_bytes=parameters,
        output_bytes_per_sample=size,
        forward_s=forward,
        backward_s={batch: 1.7 * second for batch, second in forward.items()},
    )


def profile(layers: list[LayerProfile]) -> Profile:
    return Profile(model="random", device="A100", source="made up", layers=tuple(layers))


def cluster(num_devices: int, *, num_nodes: int = 1, latency_s: float = 1e-5) -> ClusterSpec:
    link = Link(bytes_per_s=1e11, latency_s=latency_s)
    network = Link(bytes_per_s=1e10, latency_s=3 * latency_s) if num_nodes > 1 else None
    return ClusterSpec.uniform("A100", devices_per_node=num_devices, num_nodes=num_nodes, link=link, network=network)


_COSTS = st.fixed_dictionaries(
    {
        "seconds": st.sampled_from([1e-5, 7e-5, 3e-4, 1.3e-3]),
        "fixed_s": st.sampled_from([1e-5, 9e-5, 6e-4]),
        "parameters": st.sampled_from([0, 10**4, 3 * 10**7, 4 * 10**8]),
        "size": st.sampled_from([4, 10**4, 3 * 10**6]),
    }
)


@st.composite
def chains(draw: st.DrawFn, max_layers: int = 8) -> Profile:
    num_layers = draw(st.integers(1, max_layers))
    costs = draw(st.lists(_COSTS, min_size=num_layers, max_size=num_layers))
    layers = [layer(f"l{i}", (f"l{i - 1}" if i else "input",), **cost) for i, cost in enumerate(costs)]
    return profile(layers)


_LENGTHS = [(1, 1), (2, 1), (1, 2, 1), (1, 1, 1), (2, 0), (1, 1, 0), (2, 2), (3, 1), (2, 2, 2), (3, 2, 1), (4, 2, 0)]
"""Layers of each branch."""


@st.composite
def forks(draw: st.DrawFn, max_layers: int = 8) -> Profile:
    """A stem of one layer, branches (one may be a shortcut), a join and perhaps one more layer."""
    lengths = draw(st.sampled_from([lengths for lengths in _LENGTHS if sum(lengths) + 2 <= max_layers]))
    num_tail = draw(st.integers(1, max(1, min(2, max_layers - 1 - sum(lengths)))))
    takes: list[tuple[int, ...]] = [()]
    ends = []
    for length in lengths:
        before = 0
        for _ in range(length):
            takes.append((before,))
            before = len(takes) - 1
        ends.append(before)
    for place in range(num_tail):
        takes.append(tuple(dict.fromkeys(ends)) if place == 0 else (len(takes) - 1,))
    return draw(_of_graph(takes))


@st.composite
def nested(draw: st.DrawFn, max_layers: int = 8) -> Profile:
    """Series-parallel: forks one after the other, and forks inside of branches."""
    takes: list[tuple[int, ...]] = [()]

    def grow(entry: int, room: int) -> int:
        """Some layers behind `entry`, at most so many; returns the last."""
        while room > 0:
            if room < 3 or draw(st.integers(0, 2)) == 0:
                takes.append((entry,))
                entry, room = len(takes) - 1, room - 1
                continue
            before, ends = len(takes), []
            for _ in range(draw(st.integers(2, 3))):
                left = room - 1 - (len(takes) - before)
                if left < 1:
                    break
                takes.append((entry,))
                ends.append(grow(len(takes) - 1, draw(st.integers(0, left - 1))))
            if draw(st.booleans()):
                ends.append(entry)  # a shortcut
            takes.append(tuple(ends))
            room -= len(takes) - before
            entry = len(takes) - 1
        return entry

    grow(0, draw(st.integers(3, max_layers - 1)))
    return draw(_of_graph(takes))


@st.composite
def _of_graph(draw: st.DrawFn, takes: list[tuple[int, ...]]) -> Profile:
    costs = draw(st.lists(_COSTS, min_size=len(takes), max_size=len(takes)))
    names = [tuple(f"l{i}" for i in taken) or ("input",) for taken in takes]
    return profile([layer(f"l{i}", names[i], **cost) for i, cost in enumerate(costs)])


@st.composite
def graphs(draw: st.DrawFn, max_layers: int = 9, *, min_layers: int = 2) -> Profile:
    """Any graph: layers take from one or two earlier ones, or from the model's input."""
    layers = []
    for index in range(draw(st.integers(min_layers, max_layers))):
        names = st.sampled_from([f"l{i}" for i in range(index)] or ["input"])
        inputs = draw(st.lists(names, min_size=1, max_size=2, unique=True))
        layers.append(layer(f"l{index}", tuple(inputs), **draw(_COSTS)))
    return profile(layers)
