// What a rank does while the others' partial sums are on their way: it reads weights that it will need next into the caches. Decoding
// waits for memory most of all, so the time between devices is not lost.
#include "program.h"

enum {
    READ_AHEAD_STEP = 32768, // some 3 us: as long as it takes to look for a frame
    READ_AHEAD = 2097152,    // at an exchange; more would push out what was read first
};

size_t meshllm_program_read_ahead(struct meshllm_program *p) {
    if (p->state != PROGRAM_AT_EXCHANGE || p->ahead_total >= READ_AHEAD) return 0;
    for (; p->ahead_op < p->n_ops && p->ops[p->ahead_op].opcode != MESHLLM_OP_EXCHANGE; p->ahead_op++, p->ahead_at = 0) {
        const struct meshllm_op *op = &p->ops[p->ahead_op];
        if (op->opcode != MESHLLM_OP_MATMUL) continue;
        size_t left = p->weights[op->weight].size - p->ahead_at, n = left < READ_AHEAD_STEP ? left : READ_AHEAD_STEP;
        if (!n) continue;
        const char *from = (const char *)p->weights[op->weight].data + p->ahead_at;
        for (size_t i = 0; i < n; i += 64) __builtin_prefetch(from + i, 0, 2);
        p->ahead_at += n;
        p->ahead_total += n;
        return n;
    }
    return 0;
}
