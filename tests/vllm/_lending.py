"""vLLM's scheduler of a decode engine, without an engine, and a KV connector for it: each prompt's
keys and values are fetched, and arrive when the test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from collections.abc import Collection

BLOCK = 16
# What two prompts of four blocks take that have two of them in common; and vLLM's null block.
BLOCKS = 6 + 1
HEAD = [7] * (2 * BLOCK)


class LendingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Offers the whole prompt of each request once, as NIXL does."""

    _offered: frozenset[str] = frozenset()

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        left = 0 if request.request_id in self._offered else request.num_prompt_tokens - computed
        return left, left > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        del blocks, external
        self._offered |= {request.request_id}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        del scheduler_output
        return KVConnectorMetadata()

    def reset_cache(self) -> bool:
        return True

    # The worker's side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class DecodeScheduler(Scheduler):  # type: ignore[misc]
    """Of a decode engine whose cache has room for six blocks.

    Args:
        model: the checkpoint's folder.
    """

    def __init__(self, model: str) -> None:
        config = EngineArgs(
            model=model,
            block_size=BLOCK,
            max_model_len=BLOCK * (BLOCKS - 1),
            kv_transfer_config=KVTransferConfig(
                kv_connector="LendingConnector",
                kv_connector_module_path="tests.vllm._lending",
                kv_role="kv_both",
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        init_none_hash(sha256)
        super().__init__(config, cache, StructuredOutputManager(config), BLOCK)

    def ask(self, name: str) -> None:
        """Ask for a token after three and a half blocks, of which the first two are HEAD."""
        prompt = [*HEAD, *[ord(name)] * (BLOCK + BLOCK // 2)]
        sampling = SamplingParams(max_tokens=1)
        sampling.update_from_generation_config({}, eos_token_id=0)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, prompt, sampling, None, block_hasher=hasher)
        request.wavebus_own_salt = request.wavebus_salt = ""
        self.add_request(request)

    def step(self, arrived: Collection[str] = ()) -> list[str]:
        """One step, in which the keys and values of these requests come.

        Returns:
            The requests that it has computed.
        """
        scheduled = self.schedule()
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[1] for _ in names],
            kv_connector_output=KVConnectorOutput(finished_recving=set(arrived)),
        )
        self.update_from_output(scheduled, output)
        return names
