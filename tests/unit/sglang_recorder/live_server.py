"""HTTP around a recording scheduler, for `record --url`."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.schema.prompts import Prompt
from tests.unit.sglang_recorder.fake_sglang import Request, Scheduler


@dataclass
class Recording:
    """A fake server whose plugin records."""

    state: State
    worker: Any
    folder: Path

    def facts(self) -> dict[str, Any] | None:
        return self.state.report()["active"].get("recorder")

    def problems(self) -> list[str]:
        return list(self.state.report()["problems"])

    def scheduler(self, **options: Any) -> Scheduler:
        return Scheduler(self.worker, **options)


class FakeServer:
    """HTTP around a recording scheduler in a thread of its own.

    dies_after: answers after which nothing is answered any more.
    """

    def __init__(self, recording: Recording, models: Path, *, max_running: int = 3) -> None:
        self.recording, self.models = recording, models
        self.scheduler = Scheduler(recording.worker, max_running=max_running, late=True)
        self.fate: dict[str, str] = {}
        self.lock = threading.Lock()
        self.batches: set[int] = set()
        self.dies_after: int | None = None
        self.answered = 0
        self.stop = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop:
            with self.lock:
                busy = bool(self.scheduler.waiting or self.scheduler.running)
                if busy:
                    self.scheduler.step()
                    self.batches.add(len(self.scheduler.running))
                    self._fates()
            time.sleep(0.0 if busy else 0.002)

    def _fates(self) -> None:
        for request in list(self.scheduler.running):
            fate = self.fate.get(request.rid)
            if fate == "abort" and len(request.output) >= 3:
                request.aborted = True
            if fate == "retract" and len(request.output) >= 3 and not request.finished:
                self.scheduler.retract(request)
                del self.fate[request.rid]

    def __call__(self, exchange: Any) -> None:
        if self.dies_after is not None and self.answered >= self.dies_after:
            exchange.drop()
            return
        if exchange.path == "/server_info":
            exchange.reply(self.info())
            return
        body = exchange.body
        prompt = [1 + ord(letter) % 40 for letter in body["text"]]
        request = Request(body["rid"], prompt, body["sampling_params"]["max_new_tokens"])
        with self.lock:
            if "abort" in body["text"] or "back" in body["text"]:
                self.fate[request.rid] = "abort" if "abort" in body["text"] else "retract"
            self.scheduler.waiting.append(request)
        while not request.finished:
            time.sleep(0.001)
        self.answered += 1
        exchange.stream([self._event(request)])

    def _event(self, request: Request) -> dict[str, Any]:
        ids = request.answer()
        kind = "length" if len(ids) == request.limit else "stop"
        reason = {"type": "abort", "message": "gone"} if request.aborted else {"type": kind}
        return {
            "output_ids": ids,
            "prompt_token_ids": request.prompt,
            "meta_info": {
                "finish_reason": reason,
                "completion_tokens": len(ids),
                "prompt_tokens": len(request.prompt),
            },
        }

    def info(self) -> dict[str, Any]:
        return {
            "model_path": str(self.models / "target"),
            "speculative_draft_model_path": str(self.models / "drafter"),
            "internal_states": [{"specpilot": self.recording.state.report()}],
        }


def prompts(texts: list[str], limit: int = 14) -> list[Prompt]:
    return [
        Prompt(request_id=f"p{n}", benchmark="b", text=text, max_new_tokens=limit)
        for n, text in enumerate(texts)
    ]
