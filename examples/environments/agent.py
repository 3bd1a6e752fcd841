"""An agent of the openai package with a calculator; docs/environments.md has the command that trains it.

Nothing here but the reward, which is printed last, has to do with the training.
"""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Calculates a product.", "parameters": PARAMETERS}


def calculator(arguments: str) -> str:
    """The product of two numbers; the model writes each digit as a word."""
    try:
        a, b = json.loads(arguments)["expression"].replace(" ", "").split("*")
        return " ".join(str(int(a) * int(b)))
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # the model may write anything
        return f"Error: {error}"


row = json.load(sys.stdin)
client, messages, tools = OpenAI(), row["prompt"], [{"type": "function", "function": FUNCTION}]
for _ in range(3):
    reply = client.chat.completions.create(model="policy", messages=messages, tools=tools)
    message = reply.choices[0].message
    messages.append(message.to_dict())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = calculator(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = (message.content or "").removeprefix("answer").replace(" ", "")
print(json.dumps({"reward": float(answer == row["reward_model"]["ground_truth"])}))
