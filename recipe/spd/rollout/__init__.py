"""The rollout and its judge: actions, hybrid contexts, completions by vLLM servers, grades and labels."""
