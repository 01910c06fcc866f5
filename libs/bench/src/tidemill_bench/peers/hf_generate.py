"""HF transformers `generate` as a peer: run as a script, one JSON line of requests in, one JSON line of timings out.

In: {"prompts": [[ids]], "output_tokens": n}: one batch. Out: {"ttft_s", "total_s", "output_tokens"}.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class StepClock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of each step; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    """Loads the model named by the first argument in fp32 and serves batches from standard input."""
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor(request["prompts"])
        clock = StepClock()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=request["output_tokens"],
                max_new_tokens=request["output_tokens"],
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        answer = {
            "ttft_s": clock.times[0] - start,
            "total_s": clock.times[-1] - start,
            "output_tokens": request["output_tokens"] * len(ids),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
