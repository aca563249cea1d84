// Which kernels run here: compiled in, allowed by the CPU and by the operating system. Best first.
#include <stdbool.h>
#include <string.h>

#include "cpu_features.h"
#include "dispatch.h"

struct isa {
    const struct kernels *kernels;
    bool (*runs)(void);
};

static bool always(void) { return true; }

static const struct isa isas[] = {
#if defined(__x86_64__)
    {&kernels_avx512_vnni, cpu_has_avx512_vnni},
    {&kernels_avx_vnni, cpu_has_avx_vnni},
    {&kernels_avx2, cpu_has_avx2},
#elif defined(__aarch64__)
    {&kernels_neon_i8mm, cpu_has_neon_i8mm},
    {&kernels_neon_dotprod, cpu_has_neon_dotprod},
    {&kernels_neon, cpu_has_neon},
#endif
    {&kernels_scalar, always},
};
enum { N_ISAS = sizeof isas / sizeof *isas };

const char *meshllm_isa_name(uint32_t index) { return index < N_ISAS ? isas[index].kernels->name : NULL; }

int meshllm_isa_runs(uint32_t index) { return index < N_ISAS && isas[index].runs(); }

const struct kernels *dispatch_kernels(const char *name) {
    for (uint32_t i = 0; i < N_ISAS; i++)
        if ((!*name || !strcmp(name, isas[i].kernels->name)) && isas[i].runs()) return isas[i].kernels;
    return NULL;
}
