"""A small GPT of Megatron-Core, trained over Weft beside Gloo: `train_megatron.py [--only CASE]…`. Called by `cargo xtask door-test megatron`.

Megatron makes its groups for tensors, pipelines and data from the default one; nothing of it is changed. It names CUDA where it makes memory, so `OnHost` answers with host
memory, and that is all that a GPU is missing for here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from training import Case, main

WORDS, WIDTH, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 4


class OnHost(TorchFunctionMode):
    """Host memory for whoever asks for CUDA's."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        if function is torch.Tensor.cuda:
            return arguments[0]
        device = keywords.get("device")
        if device is not None and torch.device(device).type == "cuda":
            keywords["device"] = torch.device("cpu")
        return function(*arguments, **keywords)


def gpt(tensor: int = 1, pipeline: int = 1) -> Iterator[float]:
    # Megatron asks for the number of a device, and gives the answer to torch.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    with OnHost():
        yield from _gpt(tensor, pipeline)


def _gpt(tensor: int, pipeline: int) -> Iterator[float]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        # All groups are of the default group's kind.
        create_gloo_process_groups=False,
    )
    # Its other tracker has generators of CUDA. There is no dropout here, so none is missed.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        use_cpu_initialization=True,
        perform_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
        model,
    )
    wrapped.broadcast_params()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    forward_backward = get_forward_backward_func()
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)

    def data(step: int) -> Iterator[torch.Tensor]:
        replica = parallel_state.get_data_parallel_rank()
        while True:
            step += 1000
            generator = torch.Generator().manual_seed(step + 77 * replica)
            yield (torch.randint(0, WORDS, (BATCH, 1), generator=generator) + 3 * torch.arange(LENGTH + 1)) % WORDS

    def forward(batches, model):
        ids = next(batches)
        losses = model(ids[:, :-1].contiguous(), positions, mask, labels=ids[:, 1:].contiguous())

        def loss_of(losses):
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return losses, loss_of

    step = 0
    while True:
        wrapped.zero_grad_buffer()
        told = forward_backward(
            forward_step_func=forward,
            data_iterator=data(step),
            model=wrapped,
            num_microbatches=2 * pipeline,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        # The last stage knows the loss; what everybody yields is that of all replicas.
        loss = torch.stack([one["loss"] for one in told]).mean() if told else torch.zeros(())
        dist.broadcast(loss, parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        yield loss.item() / parallel_state.get_data_parallel_world_size()
        step += 1


CASES = {
    "tensor": Case(lambda: gpt(tensor=2), faults=True),
    "pipeline": Case(lambda: gpt(pipeline=2), faults=True),
    "data": Case(lambda: gpt()),
    # Groups of two in both directions, so nothing is added up in another order.
    "tensor_and_pipeline": Case(lambda: gpt(tensor=2, pipeline=2), ranks=4),
    "tensor_and_data": Case(lambda: gpt(tensor=2), ranks=4),
}

if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)
    sys.exit(main(__doc__, CASES, lambda: f"Megatron-Core {version('megatron-core')}, PyTorch {torch.__version__}", ["megatron.core.models.gpt.gpt_model", "megatron.core.pipeline_parallel"]))
