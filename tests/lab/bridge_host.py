"""A process that holds a Bridge to a still worker, for tests that kill the one or the other: `host(argv)`.

Prints {"host", "worker"} pids, then makes a call for each line on stdin and prints the reply or the error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from ppsmoke.errors import SmokeError
from ppsmoke.pipeline.bridge import Bridge
from tests.lab import still_worker


def say(message: object) -> None:
    print(json.dumps(message), flush=True)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: say("SIGINT"))
    environment = {"STAGE": "0", "NUM_STAGES": "1", **os.environ}
    bridge = await Bridge.start(environment, stage=0, on_progress=lambda line: None, target=still_worker.TARGET)
    say({"host": os.getpid(), "worker": bridge.pid})
    try:
        say(await bridge.ready)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            request = json.loads(line)
            try:
                say(await bridge.call(request.pop("op"), deadline_s=60.0, **request))
            except SmokeError as error:
                say({"error": str(error)})
    finally:
        await bridge.close()


def main() -> None:
    asyncio.run(serve())


if __name__ == "__main__":
    main()
