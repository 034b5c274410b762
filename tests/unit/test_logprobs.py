"""Chunked, vocabulary-parallel log-probs and entropies against a complete fp64 log_softmax."""

import itertools
import signal

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.algorithms.chunks import chunk_rows
from bapo_megatron.algorithms.logprobs import VocabShard, token_log_probs
from tests.distributed import run_distributed

ROWS, HIDDEN, VOCAB = 11, 5, 13


def inputs(dtype=torch.float64, rows=ROWS, vocab=VOCAB):
    generator = torch.Generator().manual_seed(0)
    hidden_RH = 2 * torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)
    targets_R = torch.randint(vocab, (rows,), generator=generator)
    edges = torch.tensor([0, vocab // 2 - 1, vocab // 2, vocab // 2 + 1, vocab - 1])  # the edges of two ranks' shards
    targets_R[: len(edges)] = edges[:rows]
    return hidden_RH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_(), targets_R


def whole(vocab=VOCAB, size=None):
    return VocabShard(group=None, start=0, size=size or vocab, vocab_size=vocab)


def reference(hidden_RH, weight_VH, targets_R, temperature):
    log_p_RV = torch.log_softmax(hidden_RH.double() @ weight_VH.double().T / temperature, dim=1)
    return log_p_RV.gather(1, targets_R[:, None])[:, 0], -(log_p_RV.exp() * log_p_RV).sum(dim=1)


def combined_loss(log_probs_R, entropy_R):
    """Return a scalar that depends on every row of both outputs, in different ways."""
    factor_R = torch.linspace(-1, 2, log_probs_R.numel(), dtype=log_probs_R.dtype)
    return (factor_R * log_probs_R).sum() + 0.7 * (factor_R.cos() * entropy_R).sum()


def reference_gradients(temperature, rows=ROWS, vocab=VOCAB):
    hidden_RH, weight_VH, targets_R = inputs(rows=rows, vocab=vocab)
    log_probs_R, entropy_R = reference(hidden_RH, weight_VH, targets_R, temperature)
    combined_loss(log_probs_R, entropy_R).backward()
    return log_probs_R.detach(), entropy_R.detach(), hidden_RH.grad, weight_VH.grad


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 4, ROWS, 1024])
def test_values_and_gradients_for_any_chunk_size(temperature, chunk_tokens):
    expected = reference_gradients(temperature)
    hidden_RH, weight_VH, targets_R = inputs()
    log_probs_R, entropy_R = token_log_probs(
        hidden_RH, weight_VH, targets_R, temperature=temperature, shard=whole(), chunk_tokens=chunk_tokens
    )
    combined_loss(log_probs_R, entropy_R).backward()
    got = (log_probs_R, entropy_R, hidden_RH.grad, weight_VH.grad)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    hidden_RH, weight_VH, targets_R = inputs(rows=4)

    def call(hidden_RH, weight_VH):
        return token_log_probs(hidden_RH, weight_VH, targets_R, temperature=0.8, shard=whole(), chunk_tokens=3)

    assert gradcheck(call, (hidden_RH, weight_VH))


def backward(hidden_RH, weight_VH, targets_R, **options):
    outputs = token_log_probs(
        hidden_RH, weight_VH, targets_R, temperature=0.6, shard=whole(), chunk_tokens=4, **options
    )
    combined_loss(*outputs).backward()


@pytest.mark.parametrize("hooks_need_grad", [False, True])
def test_weight_gradient_goes_to_main_grad(hooks_need_grad):
    """It is added to what is there; the gradient of another use, as with tied weights, is left to autograd."""
    expected = reference_gradients(0.6)
    hidden_RH, weight_VH, targets_R = inputs()
    weight_VH.main_grad = before_VH = torch.linspace(-1, 1, VOCAB * HIDDEN, dtype=torch.float64).view(VOCAB, HIDDEN)
    before_VH = before_VH.clone()
    seen_by_hook = []
    weight_VH.register_post_accumulate_grad_hook(lambda weight: seen_by_hook.append(weight.grad))
    backward(hidden_RH, weight_VH, targets_R, hooks_need_grad=hooks_need_grad)
    torch.testing.assert_close(hidden_RH.grad, expected[2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight_VH.main_grad - before_VH, expected[3], rtol=1e-10, atol=1e-12)
    (grad_VH,) = seen_by_hook
    assert not grad_VH.any() if hooks_need_grad else grad_VH is None

    weight_VH.grad = None
    outputs = token_log_probs(hidden_RH, weight_VH, targets_R, shard=whole(), hooks_need_grad=hooks_need_grad)
    (combined_loss(*outputs) + (3 * weight_VH).sum()).backward()
    assert weight_VH.grad.eq(3).all()


def test_main_grad_and_returned_gradient_agree():
    got = {}
    for way in ("main_grad", "grad"):
        hidden_RH, weight_VH, targets_R = inputs(torch.float32)
        if way == "main_grad":
            weight_VH.main_grad = torch.zeros_like(weight_VH)
        backward(hidden_RH, weight_VH, targets_R)
        got[way] = (hidden_RH.grad, getattr(weight_VH, way))
    torch.testing.assert_close(got["main_grad"], got["grad"], rtol=0, atol=0)


def test_main_grad_of_16_bit_weights_is_not_rounded():
    """float32 sums of a bfloat16 weight's gradient equal the gradient of its float64 value."""
    hidden_RH, weight_VH, targets_R = inputs(torch.bfloat16)
    weight_VH.main_grad = torch.zeros(VOCAB, HIDDEN)
    backward(hidden_RH, weight_VH, targets_R)
    exact = [x.detach().double().requires_grad_() for x in (hidden_RH, weight_VH)]
    combined_loss(*reference(*exact, targets_R, 0.6)).backward()
    torch.testing.assert_close(weight_VH.main_grad.double(), exact[1].grad, rtol=1e-5, atol=1e-5)
    assert weight_VH.grad is None


def peak_bytes(run):
    """Return the largest sum of torch's allocations during `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def test_backward_to_main_grad_needs_one_chunk_of_logits():
    """No tensor of the weight's size is made; without main_grad, the gradient is one."""
    rows, hidden, vocab, chunk = 96, 64, 4096, 16
    peaks = {}
    for way in ("main_grad", "grad"):
        hidden_RH, weight_VH = torch.randn(rows, hidden).requires_grad_(), torch.randn(vocab, hidden).requires_grad_()
        if way == "main_grad":
            weight_VH.main_grad = torch.zeros_like(weight_VH)
        log_probs_R, _ = token_log_probs(
            hidden_RH, weight_VH, torch.zeros(rows, dtype=torch.long), shard=whole(vocab), chunk_tokens=chunk
        )
        peaks[way] = peak_bytes(log_probs_R.sum().backward)
    logits, weight = 4 * chunk * vocab, 4 * vocab * hidden
    assert logits <= peaks["main_grad"] < 2 * logits + 4 * rows * hidden * 3
    assert peaks["grad"] >= peaks["main_grad"] + 0.9 * weight


@pytest.mark.parametrize("vocab_rows", [152_064, 19_008, 32_000, 600_000_000])
def test_chunks_of_a_gpu_have_one_gib_of_logits(vocab_rows):
    rows = chunk_rows(vocab_rows, on_gpu=True)
    assert rows % 256 == 0
    assert 4 * (rows + 256) * vocab_rows > 2**30
    assert rows == 256 or 4 * rows * vocab_rows <= 2**30
    assert chunk_rows(vocab_rows, on_gpu=False) == 256


def test_gradient_of_one_output_alone():
    for pick in (0, 1):
        hidden_RH, weight_VH, targets_R = inputs()
        reference(hidden_RH, weight_VH, targets_R, 1.0)[pick].sum().backward()
        expected = hidden_RH.grad.clone()
        hidden_RH.grad = None
        token_log_probs(hidden_RH, weight_VH, targets_R, shard=whole())[pick].sum().backward()
        torch.testing.assert_close(hidden_RH.grad, expected, rtol=1e-10, atol=1e-12)


def test_padding_has_no_probability_and_no_gradient():
    expected = reference_gradients(1.0)
    hidden_RH, weight_VH, targets_R = inputs()
    padded_VH = torch.cat([weight_VH.detach(), torch.full((3, HIDDEN), 50.0, dtype=torch.float64)]).requires_grad_()
    outputs = token_log_probs(hidden_RH, padded_VH, targets_R, shard=whole(size=VOCAB + 3))
    combined_loss(*outputs).backward()
    torch.testing.assert_close((*outputs, hidden_RH.grad), expected[:3], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(padded_VH.grad[:VOCAB], expected[3], rtol=1e-10, atol=1e-12)
    assert not padded_VH.grad[VOCAB:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_accumulates_in_fp32(dtype, tolerance):
    hidden_RH, weight_VH, targets_R = inputs(dtype)
    log_probs_R, entropy_R = token_log_probs(hidden_RH, weight_VH, targets_R, shard=whole())
    assert log_probs_R.dtype == entropy_R.dtype == torch.float32
    expected = reference(hidden_RH.detach(), weight_VH.detach(), targets_R, 1.0)
    torch.testing.assert_close((log_probs_R.double(), entropy_R.double()), expected, rtol=tolerance, atol=tolerance)
    log_probs_R.sum().backward()
    assert hidden_RH.grad.dtype == weight_VH.grad.dtype == dtype


def test_large_logits_do_not_overflow():
    hidden_RH, weight_VH, targets_R = inputs(torch.float32)
    hidden_RH = (1000 * hidden_RH).detach().requires_grad_()
    outputs = token_log_probs(hidden_RH, weight_VH, targets_R, shard=whole())
    sum(x.sum() for x in outputs).backward()
    assert all(torch.isfinite(x).all() for x in (*outputs, hidden_RH.grad, weight_VH.grad))


def test_without_entropy():
    hidden_RH, weight_VH, targets_R = inputs()
    log_probs_R, entropy_R = token_log_probs(hidden_RH, weight_VH, targets_R, shard=whole(), with_entropy=False)
    torch.testing.assert_close(log_probs_R, reference(hidden_RH, weight_VH, targets_R, 1.0)[0])
    assert not entropy_R.requires_grad
    assert not entropy_R.any()


def test_no_rows():
    hidden_RH, weight_VH, targets_R = inputs(rows=0)
    outputs = token_log_probs(hidden_RH, weight_VH, targets_R, shard=whole())
    assert [x.shape for x in outputs] == [(0,), (0,)]
    combined_loss(*outputs).backward()
    assert hidden_RH.grad.shape == (0, HIDDEN)
    assert not weight_VH.grad.any()


def test_logits_of_one_chunk_at_a_time(monkeypatch):
    from bapo_megatron.algorithms import logprobs

    shapes = []
    matmul = logprobs.matmul
    monkeypatch.setattr(logprobs, "matmul", lambda a, b: shapes.append((a.shape[0], b.shape[1])) or matmul(a, b))
    hidden_RH, weight_VH, targets_R = inputs()
    token_log_probs(hidden_RH, weight_VH, targets_R, shard=whole(), chunk_tokens=4)
    assert shapes == [(4, VOCAB), (4, VOCAB), (3, VOCAB)]


@pytest.mark.parametrize("way", ["main_grad", "grad"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tensor_cores_get_gradients_that_are_rounded_once(monkeypatch, way, temperature):
    """Both products read the same 16-bit gradient: the same bits as two roundings of the float32 one."""
    from bapo_megatron.algorithms import logprobs

    low, rows, chunk, vocab = torch.bfloat16, 12, 4, 31  # no other matrix has the size of a chunk of logits
    exact = logprobs.logit_gradients
    mm = torch.mm

    def product(a, b, *, out_dtype):  # as cuBLAS does: 16-bit operands, float32 sums
        assert (a.dtype, b.dtype, out_dtype) == (low, low, torch.float32)
        return mm(a.float(), b.float())

    def added(total, a, b, *, out_dtype, out):
        assert out is total
        return total.add_(product(a, b, out_dtype=out_dtype))

    monkeypatch.setattr(logprobs, "operand_dtype", lambda a, b: low)
    monkeypatch.setattr(logprobs, "_ADDMM_WIDENS", True)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "addmm", added)

    class Roundings(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            is_cast = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == low
            self.count += is_cast and args[0].numel() == chunk * vocab
            return func(*args, **(kwargs or {}))

    got, counts = [], []
    for rounds_twice in (True, False):
        if rounds_twice:  # products round what they get
            monkeypatch.setattr(logprobs, "logit_gradients", lambda *args: exact(*args[:-1], torch.float32))
        else:
            monkeypatch.setattr(logprobs, "logit_gradients", exact)
        hidden_RH, weight_VH, targets_R = inputs(low, rows, vocab)
        if way == "main_grad":
            weight_VH.main_grad = torch.zeros(vocab, HIDDEN)
        outputs = token_log_probs(
            hidden_RH, weight_VH, targets_R, temperature=temperature, shard=whole(vocab), chunk_tokens=chunk
        )
        with Roundings() as roundings:
            combined_loss(*outputs).backward()
        got.append((hidden_RH.grad, getattr(weight_VH, way)))
        counts.append(roundings.count)
    assert counts == [2 * rows // chunk, rows // chunk]
    torch.testing.assert_close(got[1], got[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_cpu_does_not_round_gradients(monkeypatch, dtype):
    from bapo_megatron.algorithms import logprobs

    gradients, seen = logprobs.logit_gradients, []
    monkeypatch.setattr(logprobs, "logit_gradients", lambda *args: seen.append(gradients(*args)) or seen[-1])
    backward(*inputs(dtype))
    assert {grad_CV.dtype for grad_CV in seen} == {torch.float64 if dtype == torch.float64 else torch.float32}


def check_shards(rank, world_size):
    """Check every split of the vocabulary, ranks that hold only padding, several chunks, and no rows at all."""
    for size, rows, chunk_tokens in ((7, ROWS, 4), (13, ROWS, 1024), (20, ROWS, 3), (7, 0, 4)):
        expected = reference_gradients(0.7, rows=rows)
        hidden_RH, weight_VH, targets_R = inputs(rows=rows)
        padding_VH = torch.full((world_size * size - VOCAB, HIDDEN), 9.0, dtype=torch.float64)
        start = rank * size
        shard_VH = torch.cat([weight_VH.detach(), padding_VH])[start : start + size].clone().requires_grad_()
        shard = VocabShard(dist.group.WORLD, start=start, size=size, vocab_size=VOCAB)
        outputs = token_log_probs(
            hidden_RH, shard_VH, targets_R, temperature=0.7, shard=shard, chunk_tokens=chunk_tokens
        )
        combined_loss(*outputs).backward()
        torch.testing.assert_close((*outputs, hidden_RH.grad), expected[:3], rtol=1e-10, atol=1e-12)
        expected_VH = torch.cat([expected[3], torch.zeros_like(padding_VH)])[start : start + size]
        torch.testing.assert_close(shard_VH.grad, expected_VH, rtol=1e-10, atol=1e-12)


def test_vocabulary_over_two_ranks():
    run_distributed(check_shards, 2)


def fail_on_rank_1(rank, world_size):
    assert rank != 1, "rank 1 means to fail"
    dist.barrier()  # rank 0 waits for a rank that will never come


def wait_forever(rank, world_size):
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        signal.pause()


def test_helper_shows_the_child_traceback():
    with pytest.raises(AssertionError, match="rank 1 means to fail"):
        run_distributed(fail_on_rank_1, 2)


def test_helper_keeps_its_deadline():
    with pytest.raises(TimeoutError, match="still running"):
        run_distributed(wait_forever, 2, timeout_s=2)
