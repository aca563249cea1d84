// What a validated program is in memory; shared by validate.c (checks it once), program.c (makes it and steps through
// it), interpreter.c (does an op) and partials.c (encodes and adds partial sums).
#ifndef MESHLLM_PROGRAM_H
#define MESHLLM_PROGRAM_H
#include <stdatomic.h>
#include <stdbool.h>

#include "kernels.h"
#include "pool.h"

struct buffer {
    uint32_t kind, width;
    float *f32;        // [max_tokens][width], kind F32
    struct q8_rows q8; // the same of int8, kind Q8
};

struct rope_table { // cosines and sines of the batch's positions for one vector of frequencies and one factor
    uint32_t weight;
    float factor;
    bool filled;    // for the running batch
    float *cos_sin; // [max_tokens][n_pairs][2]
};

enum program_state { PROGRAM_IDLE, PROGRAM_READY, PROGRAM_AT_EXCHANGE, PROGRAM_DONE };

struct arena { // pages of the system, zero, taken from it only when touched
    uint8_t *data;
    size_t size;
};

struct meshllm_program {
    struct meshllm_engine *engine;
    uint32_t n_ops, n_buffers, n_weights, n_rope_tables;
    struct meshllm_op *ops;
    uint32_t *rope_of_op; // [n_ops]: index of the rope table, for ROPE ops
    struct buffer *buffers;
    struct meshllm_weight *weights;
    struct rope_table *rope_tables;
    struct meshllm_cache_shape cache;
    uint16_t *keys, *values; // f16 [n_layers][n_slots][n_kv_heads][n_positions][head_dim]
    struct arena rows, cached;
    uint32_t max_tokens, precision;
    uint32_t n_table_rows; // tokens must be below it; UINT32_MAX without EMBED

    int32_t *tokens, *positions, *slots, *outputs; // [max_tokens] each
    uint32_t n_tokens, n_outputs, n_rows;          // n_rows: of the buffers now
    uint32_t next_op;
    uint32_t ahead_op;            // whose weights are read ahead at this EXCHANGE
    size_t ahead_at, ahead_total; // bytes of them, and of all ops at this EXCHANGE, that were
    enum program_state state;
    atomic_bool stopped;

    uint8_t *wire;           // this rank's encoded partial
    struct q8_rows partial;  // [max_tokens][exchange_width] for q8_0: a partial's values and scales, between f32 and wire
    uint16_t *f16;           // [max_tokens][exchange_width]: the same for f16, and scales on their way
    float *carry;            // [max_tokens][exchange_width]: what rounding this rank's last partial left out
    uint32_t carried_to;     // buffer that it belongs to; MESHLLM_NONE if there is none in this batch yet
    uint32_t exchange_width; // of the widest EXCHANGE; 0 without one
};

// Checks every index, kind and shape of the ops, so that the interpreter need check none. True if all are right.
bool program_validate(struct meshllm_fault *fault, uint32_t n_ops, const struct meshllm_op *ops, uint32_t n_buffers,
                      const struct meshllm_buffer *buffers, uint32_t n_weights, const struct meshllm_weight *weights,
                      const struct meshllm_cache_shape *cache, uint32_t panel_rows, uint32_t precision);

// interpreter.c: runs an op, not EXCHANGE, on the batch's rows; returns how many ops were run (independent MATMULs go together).
uint32_t program_run_op(struct meshllm_program *p, const struct meshllm_op *op);
// program.c: index of position 0 of a KV head in p->keys and p->values.
size_t program_cache_offset(const struct meshllm_program *p, uint32_t layer, uint32_t slot, uint32_t head);
// Runs job(context, row) for every row of the batch now; on all threads where rows of `width` values are worth it.
void program_for_rows(struct meshllm_program *p, pool_job *job, void *context, size_t width);

// partials.c: the bytes of a row of a partial; p->wire = the rows, to be added to buffer `out`, encoded (MESHLLM_NONE: to none, so that
// nothing is carried over); rows += encoded partials, in order.
size_t partial_row_size(uint32_t precision, uint32_t width);
void partial_encode(struct meshllm_program *p, uint32_t out, const float *rows, uint32_t width);
void partials_add(struct meshllm_program *p, float *rows, uint32_t width, uint32_t n_partials, const void *const *partials);
#endif
