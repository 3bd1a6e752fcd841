"""A calculator as a tool."""

import ast
import operator
from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """The value of integers joined by +, - and *; ValueError for anything else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only integers joined by +, - and * can be calculated")

    if len(expression) > 100:
        raise ValueError("the expression is longer than 100 characters")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression: {error.msg}") from error


class CalculatorTool(BaseTool):
    """Calculates `expression`.

    config.spaced=true is for tokenizers that write each digit as a word: spaces in the expression are ignored, and the
    digits of the result are separated by spaces.
    """

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        expression = {"type": "string", "description": "Integers joined by +, - and *, for example 12 * 34."}
        parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
        function = {"name": "calculator", "description": "Calculates an expression.", "parameters": parameters}
        return OpenAIFunctionToolSchema(type="function", function=function)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        expression, spaced = parameters["expression"], self.config.get("spaced", False)
        result = str(calculate(expression.replace(" ", "") if spaced else expression))
        return ToolResponse(text=" ".join(result) if spaced else result), 0.0, {}
