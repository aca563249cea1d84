// The arithmetic of an exchange: a rank's partial sums to bytes, and the bytes of all ranks added in rank order.
//
// Every rank adds the same bytes, its own among them, with plain f32 multiplications and additions that no compiler may fuse
// (-ffp-contract=off), so the residual stream is the same bit for bit on every rank, whatever instruction set each one uses.
//
// What rounding takes from a partial is kept and added to this rank's next partial of the same stream (error feedback, as in
// gradient compression: Seide et al., "1-bit SGD", 2014). So rounding errors do not add up over the layers of a step: the
// stream is off by those of the last exchange alone. SmolLM2 Q4_1 on two ranks, mean KL to float32 arithmetic over 512
// positions: f32 exchange 4.1e-3, f16 3.8e-3, q8_0 4.7e-3, q8_0 without this 8.0e-3.
//
// A row on the wire: f32, or f16, or for each 32 values an f16 scale and 32 int8 (GGUF's q8_0), little-endian.
#include <string.h>

#include "program.h"

enum { Q8_0_BYTES = 2 + MESHLLM_BLOCK };
static const float F16_MAX = 65504; // a larger value would become infinite and spoil the whole stream

struct partial_job {
    struct meshllm_program *p;
    uint32_t width;
    const float *in; // rows to encode
    bool carried;    // p->carry holds what was left out of the partial before
    float *out;      // rows to add to
    uint32_t n_partials;
    const void *const *partials;
};

size_t partial_row_size(uint32_t precision, uint32_t width) {
    if (precision == MESHLLM_PARTIAL_F32) return sizeof(float) * (size_t)width;
    if (precision == MESHLLM_PARTIAL_F16) return sizeof(uint16_t) * (size_t)width;
    return Q8_0_BYTES * (size_t)(width / MESHLLM_BLOCK);
}

static float clamp_f16(float x) { return x > F16_MAX ? F16_MAX : x < -F16_MAX ? -F16_MAX : x; }

// wanted: what to send; afterwards what was not.
static void encode_q8_0(struct meshllm_program *p, uint8_t *wire, size_t row, uint32_t width, float *wanted) {
    size_t n_blocks = width / MESHLLM_BLOCK;
    int8_t *values = p->partial.values + row * width;
    float *scales = p->partial.scales + row * n_blocks;
    uint16_t *f16 = p->f16 + row * width;
    p->engine->kernels->quantize(values, scales, p->partial.sums + row * n_blocks, width, wanted);
    for (size_t b = 0; b < n_blocks; b++) scales[b] = clamp_f16(scales[b]);
    p->engine->kernels->to_f16(f16, n_blocks, scales);
    p->engine->kernels->from_f16(scales, n_blocks, f16);
    for (size_t b = 0; b < n_blocks; b++) {
        memcpy(wire + b * Q8_0_BYTES, f16 + b, sizeof *f16);
        memcpy(wire + b * Q8_0_BYTES + 2, values + b * MESHLLM_BLOCK, MESHLLM_BLOCK);
        for (size_t k = b * MESHLLM_BLOCK; k < (b + 1) * MESHLLM_BLOCK; k++) wanted[k] -= scales[b] * (float)values[k];
    }
}

static void encode_f16(struct meshllm_program *p, uint8_t *wire, size_t row, uint32_t width, float *wanted) {
    float *sent = p->partial.scales + row * width;
    for (size_t k = 0; k < width; k++) sent[k] = clamp_f16(wanted[k]);
    p->engine->kernels->to_f16((uint16_t *)(void *)wire, width, sent);
    p->engine->kernels->from_f16(sent, width, (uint16_t *)(void *)wire);
    for (size_t k = 0; k < width; k++) wanted[k] -= sent[k];
}

static void encode_row(void *context, size_t row) {
    const struct partial_job *job = context;
    struct meshllm_program *p = job->p;
    const float *in = job->in + row * job->width;
    uint8_t *wire = p->wire + row * partial_row_size(p->precision, job->width);
    if (p->precision == MESHLLM_PARTIAL_F32) {
        memcpy(wire, in, sizeof(float) * job->width);
        return;
    }
    float *wanted = p->carry + row * job->width;
    for (size_t k = 0; k < job->width; k++) wanted[k] = job->carried ? wanted[k] + in[k] : in[k];
    if (p->precision == MESHLLM_PARTIAL_Q8_0) encode_q8_0(p, wire, row, job->width, wanted);
    else encode_f16(p, wire, row, job->width, wanted);
}

void partial_encode(struct meshllm_program *p, uint32_t out, const float *rows, uint32_t width) {
    struct partial_job job = {.p = p, .in = rows, .carried = out != MESHLLM_NONE && p->carried_to == out, .width = width};
    program_for_rows(p, encode_row, &job, width);
    p->carried_to = out;
}

static void add_q8_0(struct meshllm_program *p, float *out, size_t row, uint32_t width, const uint8_t *wire) {
    size_t n_blocks = width / MESHLLM_BLOCK;
    float *scales = p->partial.scales + row * n_blocks;
    uint16_t *f16 = p->f16 + row * width;
    for (size_t b = 0; b < n_blocks; b++) memcpy(f16 + b, wire + b * Q8_0_BYTES, sizeof *f16);
    p->engine->kernels->from_f16(scales, n_blocks, f16);
    for (size_t b = 0; b < n_blocks; b++) {
        int8_t values[MESHLLM_BLOCK];
        memcpy(values, wire + b * Q8_0_BYTES + 2, MESHLLM_BLOCK);
        for (size_t k = 0; k < MESHLLM_BLOCK; k++) out[b * MESHLLM_BLOCK + k] += scales[b] * (float)values[k];
    }
}

static void add_floats(struct meshllm_program *p, float *out, size_t row, uint32_t width, const uint8_t *wire) {
    float *values = p->partial.scales + row * width; // the wire's bytes may stand at any address
    if (p->precision == MESHLLM_PARTIAL_F32) {
        memcpy(values, wire, sizeof(float) * width);
    } else {
        uint16_t *f16 = p->f16 + row * width;
        memcpy(f16, wire, sizeof(uint16_t) * width);
        p->engine->kernels->from_f16(values, width, f16);
    }
    for (size_t k = 0; k < width; k++) out[k] += values[k];
}

static void add_row(void *context, size_t row) {
    const struct partial_job *job = context;
    struct meshllm_program *p = job->p;
    float *out = job->out + row * job->width;
    size_t offset = row * partial_row_size(p->precision, job->width);
    for (uint32_t i = 0; i < job->n_partials; i++) { // all on one row, while it is in the cache
        const uint8_t *wire = (const uint8_t *)job->partials[i] + offset;
        if (p->precision == MESHLLM_PARTIAL_Q8_0) add_q8_0(p, out, row, job->width, wire);
        else add_floats(p, out, row, job->width, wire);
    }
}

void partials_add(struct meshllm_program *p, float *rows, uint32_t width, uint32_t n_partials, const void *const *partials) {
    struct partial_job job = {.p = p, .width = width, .out = rows, .n_partials = n_partials, .partials = partials};
    program_for_rows(p, add_row, &job, width);
}
