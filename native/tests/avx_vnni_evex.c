// avx_vnni.c with AVX512-VNNI's encoding of its instruction, under another name: what it computes can be tested where only that one runs.
#define AVX_VNNI_TABLE kernels_avx_vnni_evex
#include "isa/avx_vnni.c"
