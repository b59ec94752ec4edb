"""SGLang's scheduler and workers in one process, without HTTP: jobs in, what requests got out.

Run with SGLang's interpreter. Standard input holds a JSON list of jobs; each runs in a fork of a
process that has imported SGLang, so a job costs seconds and not a server's start. A job:

  {"name", "arguments": [words], "plugin": {...} or null, "environment": {},
   "requests": [{"rid", "input_ids", "max_new_tokens", "at": step, "abort_at": step,
                 "ignore_eos", "temperature", ...sampling parameters}]}

A request with "follows": rid in place of "at" begins when that one is done, and its prompt is that
one's prompt and the first "keeps" tokens of its output before the request's own.

One JSON line per job goes to standard output: {"name", "state", "requests": {rid: {"output_ids",
"accepted": [committed tokens of each of its steps], "cached", "finish", "logprobs"}}, "error"}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from array import array
from typing import Any


def main() -> None:
    """Run all jobs, one after the other."""
    import sgl_kernel  # noqa: F401 - its operators are looked up while models are imported
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.models.qwen3
    import sglang.srt.models.registry
    import sglang.srt.speculative.dflash_worker_v2  # noqa: F401

    for job in json.load(sys.stdin):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os.dup2(2, 1)  # what SGLang prints is no answer
            try:
                answer = run(job)
            except BaseException:  # noqa: BLE001 - the parent reports it
                answer = {"error": traceback.format_exc()}
            with os.fdopen(write, "w") as pipe:
                json.dump({"name": job["name"], **answer}, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        sys.stdout.write((text or json.dumps({"name": job["name"], "error": "it died"})) + "\n")
        sys.stdout.flush()


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Build the scheduler of one job, feed it its requests, and drive it until all are done."""
    os.environ.update({"CPU_ENGINE_IN_PROCESS": "1", **(job.get("environment") or {})})
    simulate_again()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as plugin:
        if job.get("plugin") is not None:
            json.dump(job["plugin"], plugin)
            plugin.flush()
            os.environ["SPECPILOT_PLUGIN"] = plugin.name
        scheduler = build(job["arguments"])
    from sglang.srt.utils import DynamicGradMode

    with DynamicGradMode():  # as the scheduler's own loop
        requests = drive(scheduler, job["requests"])
    if job.get("plugin") is None:
        return {"state": None, "requests": requests}
    from specpilot_cli.engines.sglang.plugin.state import STATE

    if "recorder" in STATE.facts:
        STATE.facts["recorder"].__self__.close()  # type: ignore[attr-defined]
    return {"state": STATE.report(), "requests": requests}


def simulate_again() -> None:
    """Read the variables of simulated acceptance once more: SGLang did while it was imported."""
    from sglang.srt.environ import envs
    from sglang.srt.speculative import dflash_worker_v2, spec_utils

    for module in (spec_utils, dflash_worker_v2):
        module.SIMULATE_ACC_LEN = envs.SGLANG_SIMULATE_ACC_LEN.get()
        module.SIMULATE_ACC_TOKEN_MODE = envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get()


def build(arguments: list[str]) -> Any:
    """A scheduler as its own process would make it."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Scheduler(server_args, PortArgs.init_new(server_args))


def drive(scheduler: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Run steps until every request has its end."""
    from sglang.srt.managers.io_struct import AbortReq

    found: dict[str, Any] = {}
    live: dict[str, Any] = {}
    step, began = 0, set[str]()
    scheduler.last_batch = None
    while len(found) < len(requests) or live:
        for wanted in (one for one in requests if one["rid"] not in began):
            if begins(wanted, step, found):
                began.add(wanted["rid"])
                scheduler.process_input_requests(
                    [tokenized(scheduler, with_prompt(wanted, requests, found))]
                )
                for req in scheduler.waiting_queue:
                    live.setdefault(req.rid, req)
        for wanted in requests:
            if wanted.get("abort_at") == step:
                scheduler.process_input_requests([AbortReq(rid=wanted["rid"])])
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            before = {req.rid: len(req.output_ids) for req in batch.reqs}
            members = list(batch.reqs)
            result = scheduler.run_batch(batch)
            decoding = batch.forward_mode.is_decode() or result.accept_lens is not None
            scheduler.process_batch_result(batch, result)
            for req in members:
                if decoding and req.rid in live:
                    grown = len(req.output_ids) - before[req.rid]
                    live[req.rid].__dict__.setdefault("test_accepted", []).append(grown)
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch
        for rid, req in list(live.items()):
            if req.finished():
                found[rid] = answer_of(req)
                del live[rid]
        step += 1
        if step > 20_000:
            raise RuntimeError(f"not done: {sorted(live)}")
    return found


def answer_of(req: Any) -> dict[str, Any]:
    """What a finished request got."""
    return {
        "output_ids": list(req.output_ids)[: req.finished_len],
        "accepted": req.__dict__.get("test_accepted", []),
        "cached": req.cached_tokens,
        "finish": req.finished_reason.to_json()["type"],
        "retractions": req.retraction_count,
        "logprobs": [float(value) for value in req.logprob.output_token_logprobs_val or ()]
        if req.return_logprob
        else [],
    }


def begins(wanted: dict[str, Any], step: int, found: dict[str, Any]) -> bool:
    """Whether a request is sent now."""
    if "follows" in wanted:
        return wanted["follows"] in found
    return wanted.get("at", 0) == step


def with_prompt(
    wanted: dict[str, Any], requests: list[dict[str, Any]], found: dict[str, Any]
) -> dict[str, Any]:
    """The request with all of its prompt."""
    if "follows" not in wanted:
        return wanted
    before = next(one for one in requests if one["rid"] == wanted["follows"])
    output = found[before["rid"]]["output_ids"][: wanted["keeps"]]
    return {**wanted, "input_ids": [*before["input_ids"], *output, *wanted["input_ids"]]}


def tokenized(scheduler: Any, wanted: dict[str, Any]) -> Any:
    """A request as the tokenizer process sends it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    own = {"rid", "input_ids", "at", "abort_at", "follows", "keeps", "logprobs"}
    params = SamplingParams(**{"temperature": 0, **{
        key: value for key, value in wanted.items() if key not in own
    }})  # fmt: skip
    params.normalize(scheduler.tokenizer)
    params.verify(scheduler.model_config.vocab_size)
    return TokenizedGenerateReqInput(
        rid=wanted["rid"],
        input_text="",
        input_ids=array("q", wanted["input_ids"]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=wanted.get("logprobs", False),
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


if __name__ == "__main__":
    main()
