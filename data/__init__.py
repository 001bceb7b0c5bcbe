"""Recorded experience: readers, writers and a validator of public formats, and samplers that run inside the graph.

Modules: `types` (containers), `npz` and `validate` (files; numpy only), `dataset` (numpy arrays in, `Dataset` out), `sampling` and `replay`
(pure JAX). Nothing is imported here, so that reading a file does not need JAX.
"""
