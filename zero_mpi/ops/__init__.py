"""The operations that layers and optimizers are made of, chosen by the type of their first array.

`reference` defines each one. A faster version for an array type registers itself with
`ops.NAME.register(ArrayType)`; callers write `ops.NAME(...)` and never ask where an array lies.
"""

from functools import singledispatch

from zero_mpi.ops import reference

linear = singledispatch(reference.linear)
linear_backward_x = singledispatch(reference.linear_backward_x)
linear_backward_w = singledispatch(reference.linear_backward_w)
linear_backward_b = singledispatch(reference.linear_backward_b)
embedding = singledispatch(reference.embedding)
embedding_backward = singledispatch(reference.embedding_backward)
rms_norm = singledispatch(reference.rms_norm)
rms_norm_backward = singledispatch(reference.rms_norm_backward)
layer_norm = singledispatch(reference.layer_norm)
layer_norm_backward = singledispatch(reference.layer_norm_backward)
gelu = singledispatch(reference.gelu)
gelu_backward = singledispatch(reference.gelu_backward)
swiglu = singledispatch(reference.swiglu)
swiglu_backward = singledispatch(reference.swiglu_backward)
rope = singledispatch(reference.rope)
causal_attention = singledispatch(reference.causal_attention)
causal_attention_backward = singledispatch(reference.causal_attention_backward)
cross_entropy = singledispatch(reference.cross_entropy)
adamw = singledispatch(reference.adamw)
chunk_squares = singledispatch(reference.chunk_squares)
