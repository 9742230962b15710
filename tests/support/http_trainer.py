"""A trainer process that updates a group over a gateway's routes, one call per line of its input.

It answers each line with one of JSON: the call, its status, and its text. ``half`` sends half of
the tensors beside its call, says so, and waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import islice
from typing import Final

from safetensors.torch import load_file

from tests.support.broadcasts import BroadcastClient, described
from tests.support.checkpoints import perturbed

PATHS: Final = {
    "pause": "/pause?mode=keep",
    "start": "/start_weight_update",
    "finish": "/finish_weight_update",
    "resume": "/resume",
}


def answer(call: str, status: int, text: str) -> None:
    sys.stdout.write(json.dumps([call, status, text]) + "\n")
    sys.stdout.flush()


async def train(url: str, folder: str, seed: int) -> None:
    new = perturbed(load_file(f"{folder}/model.safetensors"), seed)
    client = BroadcastClient(url)
    while line := await asyncio.to_thread(sys.stdin.readline):
        call, *rest = line.split()
        status, text = 200, ""
        if call == "init":
            status, text = await client.init()
        elif call == "update":
            status, text = await client.update(new)
        elif call == "half":
            body = {"update_info": described(new)}
            asked = asyncio.create_task(client.call("/update_weights", body))
            await client.send(dict(islice(new.items(), len(new) // 2)))
            answer(call, status, text)
            await asked
        elif call == "folder":
            status, text = await client.call("/update_weights", {"weight_dir": rest[0]})
        else:
            status, text = await client.call(PATHS[call])
        answer(call, status, text)
    await client.close()


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1], sys.argv[2], int(sys.argv[3])))
