/* Reductions of several arrays to one, element by element, in the order of the arrays. */
#ifndef MESHLOOM_REDUCE_H
#define MESHLOOM_REDUCE_H

#include <stddef.h>

/* dst may be one of the sources. num_sources >= 1. dtype and op: ml_dtype and ml_op, a pair for which ml_reduces. */
void ml_reduce(int dtype, int op, void *dst, const void *const *sources, int num_sources, size_t count);

#endif
