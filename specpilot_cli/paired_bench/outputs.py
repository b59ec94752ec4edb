"""The answers of the comparison as recorded outputs, so that these very tokens can be audited."""

from __future__ import annotations

from specpilot_cli.paired_bench.types import PairedBenchResult
from specpilot_cli.schema.outputs import OutputRecord


def output_records(result: PairedBenchResult, system: str, *, run: int = 0) -> list[OutputRecord]:
    """What `system` answered in `run` of the comparison, in serving order.

    Empty if the comparison did not get that far, or if the system took no part in it.
    """
    prompts = {prompt.request_id: prompt for prompt in result.prompts}
    answers = result.answers(system, run=run)
    start_s = min((answer.submit_s for answer in answers), default=0.0)
    return [
        OutputRecord(
            request_id=answer.request_id,
            benchmark=prompts[answer.request_id].benchmark,
            prompt_ids=prompts[answer.request_id].input_ids,
            output_ids=answer.output_ids,
            finish_reason=answer.finish_reason,  # type: ignore[arg-type]  # checked when it arrived
            max_new_tokens=prompts[answer.request_id].max_new_tokens,
            verify_steps=answer.verify_steps,
            submit_s=answer.submit_s - start_s,
            time_to_first_token_s=answer.time_to_first_token_s,
            elapsed_s=answer.elapsed_s,
        )
        for answer in answers
    ]
