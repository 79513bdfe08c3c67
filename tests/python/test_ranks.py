# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Both layers on several ranks, threads of this process: under every cut, over the library's own communicators and over
the methods of a Python object, each rank gets the answer of one. And what goes wrong between ranks."""

import copy
import multiprocessing
import re
import threading

import numpy as np
import pytest
import topkey
from formulas.numbers import BF16
from formulas.rows import OneRank, slot_of
from hypothesis import given
from hypothesis import strategies as st

D, HEADS, PAGE, TOPK, PAGES, TOKENS = 32, 3, 4, 8, 24, 90
I32, I64 = np.int32, np.int64
CUTS = ["context", "rows", "prefill", "prefill_context"]


class Shelf:
    """Where the ranks of a group leave their bytes for each other."""

    def __init__(self, size):
        self.parts, self.met = [b""] * size, threading.Barrier(size, timeout=20)


class Seat:
    """A transport as a caller may write it."""

    def __init__(self, shelf, rank):
        self.shelf, self.rank, self.size = shelf, rank, len(shelf.parts)
        self.calls, self.failed = 0, ""

    def all_gather(self, send, receive):
        self.all_gatherv(send, receive, [len(send)] * self.size)

    def all_gatherv(self, send, receive, sizes):
        assert len(sizes) == self.size and sizes[self.rank] == len(send) and sum(sizes) == len(receive)
        self.calls += 1
        self.shelf.parts[self.rank] = bytes(send)
        self.shelf.met.wait()
        receive[:] = b"".join(self.shelf.parts)
        self.shelf.met.wait()

    def fail(self, sentence):
        self.failed = sentence
        self.shelf.met.abort()


def seats(size):
    shelf = Shelf(size)
    return [Seat(shelf, rank) for rank in range(size)]


def on_ranks(size, body):
    """body(rank) on a thread each; what each raised."""
    raised = [None] * size

    def run(rank):
        try:
            body(rank)
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class World:
    """Two requests and their tokens: steps as one rank takes them, and as each of several does. pool_size 0: the layer
    over keys."""

    def __init__(self, seed, pool_size, cut="context", size=1, interleave=1, groups=seats):
        self.rng, self.pool, self.p = np.random.default_rng(seed), pool_size > 0, max(pool_size, 1)
        self.cut, self.size = cut, size
        self.k, self.gate = (self.rng.normal(size=(2, TOKENS, D)).astype(BF16) for _ in range(2))
        self.ape = self.rng.normal(size=(self.p, D)).astype(np.float32)
        self.done = [0, 0]
        context = "context" in cut
        self.shards = [OneRank(r, size, interleave) if context else OneRank() for r in range(size)]
        self.groups, self.prefill_groups = groups(size), groups(size)
        self.alone = self.part()
        self.parts = [self.part() for _ in range(size)]

    def part(self):
        """Cache, tail, table and layer of one rank."""
        pages = np.zeros((2 * PAGES, PAGE, D + 4), np.uint8)
        table = self.rng.permutation(2 * PAGES).reshape(2, PAGES).astype(I32)
        buffer = np.full((90, TOPK + self.p + 2), 77, I32)
        shared = (pages, D, "ue8m0", TOPK, D, 96, 1000, buffer)
        if not self.pool:
            return topkey.SparseAttnIndexer(*shared), table
        tail = np.zeros((2, 2, 4 * self.p, D), BF16)
        return topkey.SparseAttnIndexerKpool(*shared, tail_cache=tail), table

    def rows(self, decodes, others):
        """(request, position) of the next tokens: request 0 decodes, or both go on with their prompts."""
        rows = []
        for b, count in enumerate((decodes, others)):
            rows += [(b, t) for t in range(self.done[b], min(TOKENS, self.done[b] + count))]
            self.done[b] = rows[-1][1] + 1 if rows and rows[-1][0] == b else self.done[b]
        return rows

    def slot(self, row, shard, table):
        b, t = row
        g = t // self.p
        if b < 0 or (t + 1) % self.p != 0 or not shard.owns(g):
            return -1
        return slot_of(shard.local(g), table[b], PAGE)

    def given(self, rows, stored, shard, part, decode_rows, padded=0):
        """Arguments of forward for these rows; stored: the tokens that slot_mapping counts."""
        k, gate = (np.zeros((len(rows), D), BF16) for _ in range(2))
        for i, (b, t) in enumerate(rows):
            k[i], gate[i] = (self.k[b, t], self.gate[b, t]) if b >= 0 else (np.nan, np.nan)
        seen = [(t + 1) // self.p for _, t in rows]
        ring = 4 * self.p
        metadata = topkey.StepMetadata(
            np.array([self.slot(row, shard, part[1]) for row in stored], I64), part[1],
            np.array([shard.local(n) for n in seen], I32), 96, decode_rows, request=np.array([b for b, _ in rows], I32),
            tail_slots=np.array([b * ring + t % ring if b >= 0 else -1 for b, t in stored], I64),
        )  # fmt: skip
        more = {"metadata": metadata}
        if self.pool:
            more |= {"gate_score": gate, "compress_ape": self.ape, "index_kpool": self.p}
            more |= {"positions": np.array([t for _, t in rows], I64)}
        return (np.zeros((len(rows) + padded, 1)),), (k,), more

    def queries(self, rows):
        """The same of a row, wherever it is answered."""
        raw, weights = np.zeros((len(rows), HEADS, D), BF16), np.zeros((len(rows), HEADS), np.float32)
        for i, (b, t) in enumerate(rows):
            own = np.random.default_rng(abs(1000 * b + t))
            raw[i], weights[i] = own.normal(size=(HEADS, D)).astype(BF16), own.normal(size=HEADS)
        codes, _, weights = topkey.quantize_q(raw, weights, rule="kpool_query", hadamard=True)
        return codes, weights

    def answer(self, part, rows, given, exec, **groups):
        """The rows' part of the buffer, and the row behind it."""
        layer = part[0]
        layer.topk_indices_buffer[:] = 77
        (hidden,), (k,), more = given
        q, w = self.queries(rows)
        assert layer.forward(hidden, q, k, w, **more, **groups, exec=exec) is layer.topk_indices_buffer
        return layer.topk_indices_buffer[: len(hidden) + 1].tolist()

    def one(self, rows, decode_rows, exec, padded=0):
        given = self.given(rows, rows, OneRank(), self.alone, decode_rows, padded)
        return self.answer(self.alone, rows, given, exec)

    def dealt(self, rows, first, rank):
        """Every size-th row behind the first ones, as many on every rank."""
        each = -(-(len(rows) - first) // self.size)
        at = [first + i * self.size + rank for i in range(each)]
        return [i if i < len(rows) else -1 for i in at]

    def rank(self, rank, rows, decode_rows, exec, padded=0):
        """What the rank answers, and which rows of the step they are."""
        part, shard = self.parts[rank], self.shards[rank]
        cut = topkey.Shard(*shard) if shard.world_size > 1 else None
        groups = {"group": self.groups[rank] if cut or self.cut == "rows" else None}
        own, stored, more = list(range(len(rows))), rows, {"shard": cut}
        if self.cut == "rows":
            sizes = [0] * self.size
            for j in range(len(rows) - decode_rows):
                sizes[j * j % self.size] += 1
            more["row_shard_sizes"] = sizes
        if "prefill" in self.cut:
            groups["prefill_group"] = self.prefill_groups[rank]
            own, padded = own[:decode_rows] + self.dealt(rows, decode_rows, rank), 0
            every = [i for r in range(self.size) for i in self.dealt(rows, decode_rows, r)]
            behind = {row: decode_rows + at for at, row in enumerate(every)}
            if self.pool:
                more["token_order"] = np.array([behind.get(i, i) for i in range(len(rows))], I32)
                more["token_positions"] = np.array([t for _, t in rows], I32)
                more["token_request"] = np.array([b for b, _ in rows], I32)
            else:
                stored = rows[:decode_rows] + [rows[i] if i >= 0 else (-1, -1) for i in every]
        mine = [rows[i] if i >= 0 else (-1, -1) for i in own]
        given = self.given(mine, stored, shard, part, decode_rows, padded)
        if cut is not None:
            more["whole_end"] = np.array([(t + 1) // self.p for _, t in mine], I32)
        if self.cut == "prefill_context" and cut is not None:
            keys = [n // self.p for n in self.done]
            more["key_indptr"], more["total_keys"] = np.array([0, keys[0], sum(keys)], I32), sum(keys) + 2
            more["gathered"] = np.zeros((sum(keys) + 2, D), np.uint8), np.zeros(sum(keys) + 2, np.float32)
            more["gathered_start"] = np.array([keys[0] if b == 1 else 0 for b, _ in mine], I32)
        given[2]["metadata"] = given[2]["metadata"]._replace(**more)
        return self.answer(part, mine, given, exec, **groups), own


@pytest.mark.parametrize("pool_size", [0, 1, 4])
@pytest.mark.parametrize("cut", CUTS)
@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(1, 5), interleave=st.sampled_from([1, 2, 16]),
    groups=st.sampled_from([seats, topkey.local_communicators]),
)  # fmt: skip
def test_every_rank_answers_as_one(backend, cut, pool_size, seed, size, interleave, groups):
    world = World(seed, pool_size, cut, size, interleave, groups)
    on, rng = topkey.Exec(backend=backend, threads=1), np.random.default_rng(seed)
    if "context" in cut and size == 1:
        world.shards = [OneRank()]
    for step in range(3):
        decodes = int(rng.integers(0, 4)) if step else int(rng.integers(1, 40))
        rows, padded = world.rows(decodes, int(rng.integers(0, 25))), int(rng.integers(0, 2))
        decode_rows = sum(b == 0 for b, _ in rows) if step else 0
        want = world.one(rows, decode_rows, on, padded)
        got = [None] * size

        def body(rank, rows=rows, decode_rows=decode_rows, padded=padded, got=got):
            got[rank] = world.rank(rank, rows, decode_rows, on, padded)

        assert on_ranks(size, body) == [None] * size
        for answers, own in got:
            for at, row in enumerate(own):
                assert answers[at] == (want[row] if row >= 0 else [-1] * len(answers[at]))
            if "prefill" not in cut:
                assert answers[len(own) :] == want[len(own) :]


@pytest.mark.parametrize("pool_size", [0, 4])
def test_only_winners_are_exchanged(on, pool_size):
    """A score and a position of each of TOPK keys, or of TOPK / pool_size pools."""
    world = World(1, pool_size, "context", 3, 1, topkey.local_communicators)
    for step in range(2):
        before = [comm.received_bytes for comm in world.groups]
        rows = world.rows(30, 10)
        assert on_ranks(3, lambda rank, rows=rows: world.rank(rank, rows, 0, on)) == [None] * 3
        if step > 0:  # the first one also compares what the ranks are
            each = 2 * (len(rows) * 8 * (TOPK // max(pool_size, 1)) + 16)  # and two hashes by which a step begins
            assert [comm.received_bytes - b for comm, b in zip(world.groups, before, strict=True)] == [each] * 3
    assert [(comm.rank, comm.size) for comm in world.groups] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("pool_size", [0, 4])
def test_ranks_that_disagree(on, pool_size):
    world = World(1, pool_size, "context", 2, 1, topkey.local_communicators)
    world.parts[1][0].topk_tokens = 4
    rows = world.rows(9, 3)
    raised = on_ranks(2, lambda rank: world.rank(rank, rows, 0, on))
    for error in raised:
        assert isinstance(error, RuntimeError)
        assert "topk must be the same on every rank, got 8 on rank 0 and 4 on rank 1" in str(error)
    assert all((part[0].topk_indices_buffer == 77).all() for part in world.parts)


class Broken(Exception):
    pass


def test_what_a_transport_raises(on):
    world = World(2, 4, "context", 2)

    def raises(send, receive):
        raise Broken("cable")

    world.groups[1].all_gather = raises
    rows = world.rows(9, 3)
    raised = on_ranks(2, lambda rank: world.rank(rank, rows, 0, on))
    assert isinstance(raised[1], Broken) and str(raised[1]) == "cable"
    assert isinstance(raised[0], threading.BrokenBarrierError)
    assert "cable" in world.groups[1].failed


def test_a_rank_that_raises_is_named(on):
    world = World(3, 0, "rows", 3, groups=topkey.local_communicators)
    rows = world.rows(20, 3)

    def body(rank):
        world.rank(rank, rows, 0, on._replace(backend="abacus") if rank == 1 else on)

    raised = on_ranks(3, body)
    assert all(isinstance(error, RuntimeError) for error in raised)
    assert "no such backend" in str(raised[1])
    for rank in (0, 2):
        assert re.search("rank 1 failed: .*no such backend", str(raised[rank]))


WRONG = [
    ({"group": None}, {"shard": topkey.Shard(0, 2)}, "group must be a communicator of the ranks, got None"),
    ({"group": None}, {"row_shard_sizes": [3, 3]}, "group must be a communicator of the ranks, got None"),
    ({}, {}, "group must be None without metadata.shard or metadata.row_shard_sizes, got Seat"),
    ({"group": 7}, {"shard": topkey.Shard(0, 2)}, "communicator: group must be a Communicator, a torch.distributed"),
    ({}, {"shard": topkey.Shard(1, 2)}, "context must be rank 0 of 2 as the communicator says, got rank 1 of 2"),
    ({}, {"shard": topkey.Shard(0, 2), "request": None}, "rows.request must be given, or block_table have a row"),
    ({}, {"row_shard_sizes": [1, 2]}, "row_shard_sizes must be all 6 prefill rows, got 3"),
    ({}, {"row_shard_sizes": [6]}, "row_shard_sizes must be of 2 ranks, got 1"),
    ({}, {"row_shard_sizes": [7, 0]}, "row_shard_sizes must be from 0 to 6, got 7"),
    ({}, {"row_shard_sizes": []}, "row_shard_sizes must be of 2 ranks, got 0"),
    ({}, {"row_shard_sizes": [3, 3, 0]}, "row_shard_sizes must be of 2 ranks, got 3"),
    ({}, {"row_shard_sizes": 6}, "row_shard_sizes must be whole numbers of 64 bits, got 6"),
    ({}, {"row_shard_sizes": [3, 2**63]}, "row_shard_sizes must be whole numbers of 64 bits, got [3,"),
    ({}, {"shard": 3}, "metadata.shard must be a Shard, got int"),
    ({}, {"shard": topkey.Shard(0, "2")}, "metadata.shard.world_size must be a whole number from 0 on, got '2'"),
    ({}, {"shard": topkey.Shard(0, 2), "gathered": 3}, "metadata.gathered must be a tuple (values, scales) or None"),
]


@pytest.mark.parametrize("pool_size", [0, 4])
@pytest.mark.parametrize(("groups", "change", "sentence"), WRONG)
def test_a_wrong_step_writes_nothing(on, pool_size, groups, change, sentence):
    world = World(4, pool_size, "context", 2)
    layer = world.alone[0]
    given = world.given(world.rows(6, 0), [(0, t) for t in range(6)], OneRank(), world.alone, 0)
    given[2]["metadata"] = given[2]["metadata"]._replace(**change)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        world.answer(world.alone, [(0, t) for t in range(6)], given, on, **({"group": world.groups[0]} | groups))
    assert (layer.topk_indices_buffer == 77).all() and not layer.k_cache.any()


@pytest.mark.parametrize("pool_size", [0, 4])
@pytest.mark.parametrize("cut", CUTS)
def test_a_workspace_of_the_limits_is_enough(on, cut, pool_size):
    """Given, and what the layer itself would take is not touched; half of what a step needs is refused."""
    world = World(6, pool_size, cut, 3, 2, topkey.local_communicators)
    ranks = {"row_shards": 3} if cut == "rows" else {"shard": topkey.Shard(0, 3, 2)} if "context" in cut else {}
    ranks |= {"prefill_size": 3} if "prefill" in cut else {}
    size = world.alone[0].workspace_bytes(60, 2, 96, **ranks)
    assert size > 0 and size >= world.alone[0].workspace_bytes(60, 2, 96)
    rows = world.rows(40, 20)
    want = world.one(rows, 0, on)
    got = [None] * 3

    def body(rank):
        given = on._replace(workspace=np.full(size, 0xC3, np.uint8))
        got[rank] = world.rank(rank, rows, 0, given)

    assert on_ranks(3, body) == [None] * 3
    for answers, own in got:
        assert [answers[at] for at, row in enumerate(own) if row >= 0] == [want[row] for row in own if row >= 0]
    raised = on_ranks(3, lambda rank: world.rank(rank, rows, 0, on._replace(workspace=np.zeros(300, np.uint8))))
    assert all("exec.workspace_bytes must be at least" in str(error) for error in raised)


@pytest.mark.parametrize("pool_size", [0, 4])
def test_a_buffer_without_all_rows_of_hidden_states_is_refused(on, pool_size):
    world = World(4, pool_size, "rows", 2, 1, topkey.local_communicators)
    rows = world.rows(9, 3)
    for layer, _ in world.parts:
        layer.topk_indices_buffer = np.full((14, TOPK + world.p), 77, I32)
    for error in on_ranks(2, lambda rank: world.rank(rank, rows, 0, on, padded=5)):
        assert "topk_indices_buffer must have the 17 rows of hidden_states, got 14" in str(error)


@pytest.mark.parametrize("pool_size", [0, 4])
@pytest.mark.parametrize("change", [{"num_decode_rows": 99}, {"end": None}, {"gathered": 3}, {"row_shard_sizes": 7}])
def test_peers_of_a_wrong_step_are_told(on, pool_size, change):
    """Also what Python itself finds wrong: they do not wait until their patience ends."""
    for groups in (topkey.local_communicators, seats):
        world = World(4, pool_size, "context", 2, 1, groups)
        rows = world.rows(9, 3)
        given = world.given

        def changed(own, stored, shard, part, decode_rows, padded=0, world=world, given=given):
            answer = given(own, stored, shard, part, decode_rows, padded)
            if part is world.parts[1]:
                answer[2]["metadata"] = answer[2]["metadata"]._replace(**change)
            return answer

        world.given = changed
        raised = on_ranks(2, lambda rank, world=world, rows=rows: world.rank(rank, rows, 0, on))
        assert isinstance(raised[1], ValueError)
        if groups is seats:
            assert isinstance(raised[0], threading.BrokenBarrierError) and str(raised[1]) in world.groups[1].failed
        else:
            assert f"rank 1 failed: {raised[1]}" in str(raised[0])


def test_one_prefill_rank_keeps_the_order_of_the_tokens(on):
    """Its rows may stand in another order than the tokens, as those of many ranks do."""
    world = World(5, 4, "prefill", 1, 1, topkey.local_communicators)
    dealt = world.dealt
    world.dealt = lambda rows, first, rank: dealt(rows, first, rank)[::-1]
    for _ in range(3):
        rows = world.rows(9, 8)
        want = world.one(rows, 0, on)
        answers, own = world.rank(0, rows, 0, on)
        assert [answers[at] for at in range(len(own))] == [want[row] for row in own]


@pytest.mark.parametrize("pool_size", [0, 4])
def test_gathered_keys_are_as_many_as_the_step_says(on, pool_size):
    """A bound of one request's length says nothing of what all of them take."""
    world = World(6, pool_size, "prefill_context", 2, 1, topkey.local_communicators)
    rows = world.rows(9, 3)
    want = world.one(rows, 0, on)
    given = world.given

    def long(*args):
        answer = given(*args)
        answer[2]["metadata"] = answer[2]["metadata"]._replace(max_len=2**31 - 1)
        return answer

    world.given = long
    got = [None] * 2

    def body(rank):
        got[rank] = world.rank(rank, rows, 0, on)

    assert on_ranks(2, body) == [None] * 2
    for answers, own in got:
        assert [answers[at] for at, row in enumerate(own) if row >= 0] == [want[row] for row in own if row >= 0]


def test_wrong_groups():
    for transport in (3, object(), None):
        with pytest.raises(ValueError, match="communicator: group must be a Communicator, a torch.distributed group"):
            topkey.communicator(transport)
    seat = seats(2)[1]
    seat.rank = 2
    with pytest.raises(ValueError, match="communicator: rank must be from 0 to size - 1, got rank 2 of 2"):
        topkey.communicator(seat)
    with pytest.raises(ValueError, match="local_communicators: size must be"):
        topkey.local_communicators(0)
    comm = topkey.local_communicators(1)[0]
    assert topkey.communicator(comm) is comm


def _torch_rank(rank, store, queue):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(5, 4, "rows", 2, groups=lambda size: [dist.group.WORLD] * size)
    on = topkey.Exec(threads=1)
    rows = world.rows(30, 11)
    want = world.one(rows, 5, on)
    queue.put(world.rank(rank, rows, 5, on)[0] == want)
    dist.destroy_process_group()


@pytest.mark.torch
def test_a_torch_group(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_torch_rank, args=(rank, tmp_path / "store", queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert [queue.get(timeout=120) for _ in ranks] == [True, True]
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0


def test_transports_of_this_build():
    assert topkey.transport_unusable("local") is None
    assert topkey.transport_unusable("pigeons") == "this library has no such transport"
    lacks = {name: topkey.transport_unusable(name) for name in ("mpi", "nccl")}
    for name, call in (("mpi", topkey.mpi_communicator), ("nccl", lambda: topkey.nccl_communicator(64))):
        if lacks[name] is not None:
            with pytest.raises(RuntimeError, match=re.escape(lacks[name])):
                call()
    for wrong in (0, -8, "world", 1.5, 2**64):
        with pytest.raises(ValueError, match="mpi_communicator: comm must be an mpi4py communicator or an address, got "):
            topkey.mpi_communicator(wrong)
        with pytest.raises(ValueError, match="nccl_communicator: comm must be an ncclComm_t as a number, got "):
            topkey.nccl_communicator(wrong)


@pytest.mark.parametrize("other", ["gate_score", "compress_ape", "positions"])
def test_a_rank_that_alone_lacks_what_pools_are_made_of(on, other):
    """All are told, before any of them has stored or waits for keys."""
    world = World(3, 4, "prefill", 3, 1, topkey.local_communicators)
    rows = world.rows(30, 30)
    given = world.given

    def without(*args):
        made = given(*args)
        return (*made[:2], made[2] | {other: None})

    def body(rank):
        if rank == 2:
            world_of_rank.given = without
        (world_of_rank if rank == 2 else world).rank(rank, rows, 0, on)

    world_of_rank = copy.copy(world)
    name = {"gate_score": "gate", "compress_ape": "ape", "positions": "positions"}[other]
    sentence = f"{name} must be the same on every rank, got given on rank 0 and absent on rank 2"
    before = [part[0].k_cache.tobytes() for part in world.parts]
    for error in on_ranks(3, body):
        assert isinstance(error, RuntimeError) and sentence in str(error)
    assert [part[0].k_cache.tobytes() for part in world.parts] == before
