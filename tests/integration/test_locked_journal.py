"""The journal of a real broker with keys: replayed with all that it has refused."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

from bus._keys import read_key
from bus.messages import Heartbeat, Join, Nack, NackCode, Status, StatusRequest, Welcome
from tests.support.frames import BarePeer
from tests.support.keys import KeyFolder
from tests.support.procs import Proc, run_wavebus, wavebus
from tests.unit.bus._builders import TRAINER_JOIN, engine_join

if TYPE_CHECKING:
    from pathlib import Path

BEAT = Heartbeat("running", 0, 0, "")
OBSERVER_JOIN = Join("observer", "host", 9, None, None)


def shown(folder: Path, *filters: str) -> list[dict[str, Any]]:
    done = run_wavebus("journal", "show", str(folder), "--json", *filters)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_keys_a_refused_role_a_flood_and_sighup_are_replayed(tmp_path: Path) -> None:
    """The flood is told once; public keys stand in the journal, and no secret does."""
    keys, folder = KeyFolder(tmp_path), tmp_path / "journal"
    engine, trainer = keys.peer("engine-1", "engine"), keys.peer("trainer", "trainer")
    observer = keys.peer("watch", "observer")
    options = ("--curve-keys", str(keys.broker), "--journal", str(folder))

    async def said(broker: Proc, address: str) -> None:
        with (
            BarePeer(address, "e0", engine) as honest,
            BarePeer(address, "t", trainer) as goes,
            BarePeer(address, "o", observer) as wrong,
            BarePeer(address, "f", observer) as loud,
        ):
            assert isinstance(await honest.ask(engine_join()), Welcome)
            assert isinstance(await goes.ask(TRAINER_JOIN), Welcome)
            assert (await wrong.refusal(wrong.frame(TRAINER_JOIN))).code is NackCode.FORBIDDEN
            assert isinstance(await wrong.ask(OBSERVER_JOIN), Welcome)
            for _ in range(300):
                await loud.say(loud.frame(BEAT))
            await loud.until(lambda: told(loud, NackCode.RATE_LIMITED))
            (keys.authorized / "trainer.pub").unlink()
            broker.signal(signal.SIGHUP)
            await asyncio.to_thread(broker.wait_event, "keys_reloaded")
            await goes.say(goes.frame(StatusRequest()))
            assert isinstance(await wrong.ask(StatusRequest()), Status)

    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", *options) as broker:
        address = broker.first_line()
        secret = tmp_path / "peers" / "watch.secret"
        flags = ("--key", str(secret), "--broker-key", str(keys.public))
        answer = run_wavebus("why", "--broker", address, *flags)
        assert (answer.returncode, answer.stdout) == (0, "nothing is waited for\n")
        asyncio.run(said(broker, address))
        assert broker.stop() == 0

    done = run_wavebus("replay", str(folder), "--json")
    assert done.returncode == 0, done.stdout
    (life,) = json.loads(done.stdout)["lives"]
    assert life["closed"]
    assert run_wavebus("why", "--journal", str(folder)).returncode == 0
    records = shown(folder)
    public = {name: keys.public_of(name) for name in ("engine-1", "trainer", "watch")}
    assert records[0]["keys"] == {
        public["engine-1"]: "engine",
        public["trainer"]: "trainer",
        public["watch"]: "observer",
    }
    (others,) = [each["keys"] for each in records if each["what"] == "keys"]
    assert others == {public["engine-1"]: "engine", public["watch"]: "observer"}
    assert {each["key"] for each in records if each["what"] == "in"} == set(public.values())
    flood = shown(folder, "--engine", "f")
    assert sum(each["what"] == "in" for each in flood) < 100
    assert 1 <= sum(each["what"] == "refused" for each in flood) < 20
    data = b"".join(path.read_bytes() for path in folder.iterdir())
    files = [keys.broker / "broker.secret", *(tmp_path / "peers").glob("*.secret")]
    assert len(files) == 4
    for file in files:
        assert read_key(file, secret=True).secret.encode() not in data


def told(peer: BarePeer, code: NackCode) -> bool:
    return any(isinstance(message, Nack) and message.code is code for _, message in peer.heard)
