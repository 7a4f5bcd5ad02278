"""Thresholds on the host: where more than k pass a fixed one a sample raises it, which does not show in what is sent;
a sample's is its k-th largest number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from espresso.compressors import DrawKey, Encoding, Feedback, Segment, create, host_codec
from espresso.compressors.sparse import sent_slots
from espresso.cpu_offload import WorkerPool
from espresso.cpu_offload.kernels import kth_largest
from espresso.cpu_offload.sparse import RAISE_RUNS, first_threshold
from espresso.cpu_offload.work import FUSED, work_of

NUMEL = (1 << 16) + 1011


def test_a_raised_threshold_changes_nothing() -> None:
    """The k largest that pass; also in steps whose sample saw too many large numbers, so that fewer than k passed."""
    compressor = create("threshold:threshold=0.5,ratio=0.05")
    layout = compressor.layout([Segment("t", 0, NUMEL)])
    k, starts = int(layout.counts[0]), np.zeros(1, np.int64)
    random = np.random.default_rng(0)
    source = (0.5 + random.random(NUMEL)).astype(np.float32)
    # Together in every stretch that a run is taken from, so that samples differ in how much they see of them.
    source[np.arange(NUMEL) % (NUMEL // RAISE_RUNS) < 52] += 10
    source *= random.choice([-1, 1], NUMEL).astype(np.float32)
    bits = np.abs(source).view(np.uint32)
    wanted = np.sort(np.argsort(-bits.astype(np.int64), kind="stable")[:k])
    row, enough = work_of(layout).table[0].copy(), []
    room, histogram = np.empty(NUMEL + 16, np.uint32), np.empty(1 << 11, np.int64)
    zeros, kept, payload = np.zeros_like(source), np.empty_like(source), np.empty(layout.num_bytes, np.uint8)
    with WorkerPool(2) as pool:
        codecs = (host_codec(compressor), host_codec(compressor, pool))
        for step in range(60):
            raised = first_threshold(
                row, source, np.float32(1), zeros, True, 0.0, 0.0, np.float32(0.5).view(np.uint32), step, room,
                np.uint32(0x7FFFFFFF), histogram,
            )  # fmt: skip
            assert raised > np.float32(0.5).view(np.uint32)
            enough.append(int((bits >= raised).sum()) >= k)
            if step > 3 and enough[-1]:
                continue
            feedback = Feedback(zeros, kept, starts)
            assert codecs[step % 2].encode(
                Encoding(layout, source, starts, feedback=feedback, key=DrawKey(step=step)), payload
            )
            ((_, indices),) = sent_slots(layout, payload)
            assert np.array_equal(indices, wanted)
            assert np.array_equal(kept, np.where(np.isin(np.arange(NUMEL), wanted), 0, source))
    assert 0 < sum(enough) < len(enough)


def test_threads_that_share_a_segment_agree_with_one_alone() -> None:
    numel = FUSED + 5
    compressor, starts = create("threshold"), np.zeros(1, np.int64)
    layout = compressor.layout([Segment("t", 0, numel)])
    source = np.random.default_rng(2).standard_normal(numel).astype(np.float32)
    zeros, outcomes = np.zeros_like(source), []
    with WorkerPool(2) as pool:
        for threads in (None, pool):
            kept, payload = np.empty_like(source), np.empty(layout.num_bytes, np.uint8)
            feedback = Feedback(zeros, kept, starts, 0.25)
            assert host_codec(compressor, threads).encode(Encoding(layout, source, starts, feedback=feedback), payload)
            outcomes.append((payload.tobytes(), kept.tobytes()))
    assert outcomes[0] == outcomes[1]
    ((_, indices),) = sent_slots(layout, payload)
    assert indices.size == layout.counts[0]
    assert np.abs(source[indices]).min() >= np.abs(np.delete(source, indices)).max()


def test_a_threshold_that_few_pass_is_not_lowered() -> None:
    layout = create("threshold:threshold=3,ratio=0.05").layout([Segment("t", 0, NUMEL)])
    source = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    payload = np.empty(layout.num_bytes, np.uint8)
    codec = host_codec(create("threshold:threshold=3,ratio=0.05"))
    assert codec.encode(Encoding(layout, source, np.zeros(1, np.int64)), payload)
    ((_, indices),) = sent_slots(layout, payload)
    assert np.array_equal(indices, np.flatnonzero(np.abs(source) >= 3))


def test_no_compression_has_a_layout_whatever_travels_raw() -> None:
    layout = create("none:raw_below=1").layout([Segment("t", 0, 300)])
    assert layout.raw.all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from((np.uint32, np.uint64)), st.data())
def test_the_kth_largest_number_and_how_many_of_its_equals_belong_to_the_top(dtype: Any, data: st.DataObject) -> None:
    most = np.iinfo(dtype).max >> 1  # magnitudes have no sign
    near = st.integers(most // 3, most // 3 + 3000)
    values = data.draw(st.lists(st.one_of(st.integers(0, most), near, st.sampled_from((0, 7, most))), min_size=1))
    k = data.draw(st.integers(1, len(values)))
    in_order = sorted(values, reverse=True)
    found, ties = kth_largest(np.array(values, dtype), len(values), k, np.empty(1 << 11, np.int64))
    assert found == in_order[k - 1]
    assert ties == in_order[:k].count(in_order[k - 1])
