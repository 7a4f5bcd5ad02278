"""Jobs for the tests of timeline and search: small, with round costs, and random ones."""

from hypothesis import strategies as st

from espresso.model.costs import (
    ComputeCost,
    Contention,
    CopyCost,
    CostModel,
    Op,
    ServerCosts,
)
from espresso.model.job import Job
from espresso.model.links import AlphaBeta, Links
from espresso.strategies import (
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Mode,
    Slot,
    Strategy,
    TensorSpec,
    options_for,
    parse_option,
)

TOY = CompressorSpec("efsignsgd")
GATHER = Choice(parse_option("comp > flat.allgather > dec"), TOY)
TWO_WAY = Choice(parse_option("comp > flat.push > dec@server > comp@server > flat.pull > dec"), TOY)
PUSH_RAW = Choice(parse_option("flat.push > sum@server > flat.pull"))
HOST_GATHER = Choice(parse_option("comp@offload > flat.allgather > dec@offload"), TOY)


def tenth(spec, elements, dtype, segments):
    """A compressor of ten to one."""
    return -(-4 * elements // 10)


def compute(encode_us, decode_us, *, host=1.0, name="efsignsgd", per=1000.0):
    """Costs in proportion to elements, ``host`` times as long on the offload pool."""
    return tuple(
        ComputeCost(name, device, op, ((0.0, 0.0), (per, us * factor)))
        for device, factor in ((Device.TRAINING, 1.0), (Device.OFFLOAD, host))
        for op, us in ((Op.ENCODE, encode_us), (Op.DECODE, decode_us))
    )


def make_job(
    sizes,
    gaps,
    *,
    cluster=None,
    contention=None,
    beta=1.0,
    alpha=0.0,
    copy=None,
    costs=None,
    servers=None,
    latency=0.0,
    in_flight=1,
    burst=0.0,
    offload_width=1,
    **more,
):
    """A paper-mode job: beta, alpha, latency for both links; encode and decode 10 us per 1000 elements."""
    line = AlphaBeta(alpha, beta, latency)
    links = Links(line, line, in_flight=in_flight, burst_bytes=burst)
    return Job(
        "toy",
        tuple(TensorSpec(f"t{i}", (size,)) for i, size in enumerate(sizes)),
        tuple(map(float, gaps)),
        cluster or Cluster(2, 1),
        CostModel(links, costs or compute(10.0, 10.0), copy, contention or Contention(), 1, servers, offload_width),
        **more,
    )


def uniform(job, choice=PLAIN, partition_bytes=0):
    return Strategy.uniform(job.tensors, job.cluster, choice, partition_bytes=partition_bytes)


CLUSTERS = (Cluster(2, 1), Cluster(1, 2), Cluster(2, 2), Cluster(3, 2), Cluster(2, 2, 2), Cluster(2, 1, 1))
SIZES = (64, 100, 1000, 1000, 5000)
LATENCIES = st.sampled_from((0.0, 0.0, 7.3, 41.0))
WIDTHS = st.sampled_from((1, 1, 2, 3))
BURSTS = st.sampled_from((0.0, 0.0, 3000.0, 20_000.0))
CONTENTIONS = (
    Contention(),
    Contention(1.0, 1.0, 1.0, {"flat": 0.25, "inter": 0.25, "intra": 1.0}),
    Contention(2.0, 1.0, 3.0, {"flat.allgather": 0.5}),
)


@st.composite
def jobs(draw, contentions=CONTENTIONS, most=6):
    """Random jobs: paper or DDP mode, any contention, any widths, with or without host copies."""
    count = draw(st.integers(1, most))
    sizes = [draw(st.sampled_from(SIZES)) for _ in range(count)]
    gaps = [0.0, *(float(draw(st.integers(0, 60))) for _ in range(count - 1))]
    cluster = draw(st.sampled_from(CLUSTERS))
    costs = CostModel(
        Links(
            AlphaBeta(draw(st.sampled_from((0.5, 3.0))), draw(st.sampled_from((0.25, 1.7))), draw(LATENCIES)),
            AlphaBeta(draw(st.sampled_from((1.25, 9.0))), draw(st.sampled_from((1.1, 4.0))), draw(LATENCIES)),
            in_flight=draw(WIDTHS),
            burst_bytes=draw(BURSTS),
        ),
        compute(draw(st.sampled_from((1.3, 7.0))), draw(st.sampled_from((0.7, 3.1))), host=1.9),
        draw(st.sampled_from((None, CopyCost(0.3, 0.9), CopyCost(0.3, 0.9, True)))),
        draw(st.sampled_from(contentions)),
        cluster.ranks_per_node,
        ServerCosts(0.1, draw(st.integers(1, 3)), draw(st.sampled_from((None, AlphaBeta(2.0, 0.7, 3.3))))),
        draw(WIDTHS),
    )
    tensors = tuple(TensorSpec(f"t{i}", (size,)) for i, size in enumerate(sizes))
    forward_us = draw(st.sampled_from((7.0, 700.0)))
    if draw(st.booleans()):
        return Job("random", tensors, tuple(gaps), cluster, costs, forward_us=forward_us, optimizer_us=2.0)
    buckets, ready, start, now = [], [], 0, 0.0
    while start < count:
        stop = draw(st.integers(start + 1, count))
        slots, offset = [], 0
        for tensor in tensors[start:stop]:
            slots.append(Slot(tensor.name, offset, tensor.numel))
            offset += tensor.numel
        now += sum(gaps[start:stop])
        buckets.append(Bucket(len(buckets), tuple(slots)))
        ready.append(now)
        start = stop
    return Job("random", tensors, tuple(gaps), cluster, costs, Mode.DDP, tuple(buckets), tuple(ready), forward_us, 2.0)


@st.composite
def choices(draw, cluster):
    """Any leaf of the tree on any devices, or plain."""
    leaves = options_for(cluster, summable=True)
    option = draw(st.sampled_from(leaves))
    return Choice(option, TOY) if option.is_compressed else Choice(option)


@st.composite
def planned(draw, contentions=CONTENTIONS, per_bucket=False):
    """(job, strategy): a choice per tensor, or one per bucket."""
    job = draw(jobs(contentions))
    picked = {}
    for bucket in job.laid_out:
        shared = draw(choices(job.cluster))
        for slot in bucket.slots:
            picked[slot.tensor] = shared if per_bucket else draw(choices(job.cluster))
    size = draw(st.sampled_from((0, 1024, 4096)))
    return job, Strategy(job.tensors, picked, job.cluster, size)
