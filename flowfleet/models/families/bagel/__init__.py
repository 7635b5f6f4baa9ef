"""BAGEL, https://arxiv.org/abs/2505.14683: one transformer that paints and answers.

`painter` is its adapter as a flow, `writer` the one as a model that writes text; both hold the module of `transformer`.
"""
