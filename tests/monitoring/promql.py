"""What PromQL expressions of boards and rules read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser

VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}
"""Grafana's own, as the tests fill them in."""


def filled(expression: str, values: Mapping[str, str]) -> str:
    """Replaces Grafana's variables, longest names first."""
    every = {**VARIABLES, **{f"${name}": value for name, value in values.items()}}
    for name in sorted(every, key=len, reverse=True):
        expression = expression.replace(name, every[name])
    return expression


def metrics(expression: str) -> set[str]:
    """Names of the metrics that an expression without variables reads. Raises ValueError where it is no PromQL."""
    return {str(selector.name) for selector in _selectors(promql_parser.parse(expression)) if selector.name}


def patterns(expression: str) -> set[str]:
    """Regular expressions by which it chooses metrics, in place of names."""
    every = (
        matcher for selector in _selectors(promql_parser.parse(expression)) for matcher in selector.matchers.matchers
    )
    return {matcher.value for matcher in every if (matcher.name, matcher.op) == ("__name__", promql_parser.MatchOp.Re)}


def _selectors(node: Any) -> Iterator[Any]:
    match type(node).__name__:
        case "VectorSelector":
            yield node
        case "MatrixSelector":
            yield node.vector_selector
        case "BinaryExpr":
            yield from _selectors(node.lhs)
            yield from _selectors(node.rhs)
        case "Call":
            for argument in node.args:
                yield from _selectors(argument)
        case "AggregateExpr" | "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from _selectors(node.expr)
