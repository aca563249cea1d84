// All bodies over an ISA file's primitives, and its table: KERNELS_TABLE(kernels_avx2, "avx2").
#include "body/exp.h"
// exp first: the others use it
#include "body/attention.h"
#include "body/elementwise.h"
#include "body/matmul.h"
#include "body/norm.h"
#include "body/rope.h"

#define KERNELS_TABLE(table, label)                                                                                               \
    const struct kernels table = {label,  LANES,     matmul, quantize, rms_norm, rope,       attention,                           \
                                  to_f16, from_f16, gate,   add,      scale,    read_bytes};
