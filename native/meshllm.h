// The C interface of meshllm, and nothing else. Compiled by the C sources and read by build.py, which hands the part
// between the two marker comments to cffi; so it keeps to what cffi parses: no #if, only integer #defines.
//
// Rules for every function here: it never prints, exits or aborts; it checks the handles' own state but trusts pointers;
// lengths stand before their pointers; a function that can fail returns enum meshllm_status.
#ifndef MESHLLM_H
#define MESHLLM_H
#include <stddef.h>
#include <stdint.h>

/* cdef: begin */
#define MESHLLM_BLOCK 32   // values in a block of quantized activations or of a q8_0 partial
#define MESHLLM_NONE 0xffffffff // "no operand" in an op

enum meshllm_status {
    MESHLLM_OK = 0,
    MESHLLM_EXCHANGE = 1,      // program_run stopped at an EXCHANGE op: supply the partials, then run again
    MESHLLM_STOPPED = 2,       // program_stop was called; the batch is void
    MESHLLM_NOTHING = 3,       // link_receive: no whole frame has come yet
    MESHLLM_PARTIAL = 4,       // link_receive: the next frame carries a partial sum, which only a communicator takes
    MESHLLM_MESSAGE = 5,       // communicator_run: a rank sent something else than the partial that is due
    MESHLLM_BAD_ARGUMENT = -1, // the caller's fault
    MESHLLM_BAD_PROGRAM = -2,  // program_new refused an op: see struct meshllm_fault
    MESHLLM_NO_MEMORY = -3,
    MESHLLM_NO_ISA = -4,       // the instruction set asked for does not run here
    MESHLLM_NO_CIPHER = -5,    // there is no libcrypto.so.3 on this device
    MESHLLM_LINK_CLOSED = -6,  // by the other end. This and those that follow end a link
    MESHLLM_LINK_FAILED = -7,  // link_detail: errno
    MESHLLM_BAD_LENGTH = -8,   // a frame of link_detail bytes
    MESHLLM_FORGED = -9,       // a frame that the other end has not sealed, or not now
    MESHLLM_WRONG_PARTIAL = -10, // of another exchange or size than is due; link_receive says MESHLLM_PARTIAL of it
};

// Weight formats; the numbers are those of GGUF.
enum meshllm_format {
    MESHLLM_F32 = 0,
    MESHLLM_F16 = 1,
    MESHLLM_Q4_0 = 2,
    MESHLLM_Q4_1 = 3,
    MESHLLM_Q5_0 = 6,
    MESHLLM_Q5_1 = 7,
    MESHLLM_Q8_0 = 8,
    MESHLLM_Q2_K = 10,
    MESHLLM_Q3_K = 11,
    MESHLLM_Q4_K = 12,
    MESHLLM_Q5_K = 13,
    MESHLLM_Q6_K = 14,
    MESHLLM_IQ4_NL = 20,
    MESHLLM_BF16 = 30,
};

// How partial sums travel between ranks.
enum meshllm_precision {
    MESHLLM_PARTIAL_F32 = 0, // 4 bytes a value
    MESHLLM_PARTIAL_F16 = 1, // 2 bytes a value
    MESHLLM_PARTIAL_Q8_0 = 2, // 34 bytes for 32 values (f16 scale, 32 int8); the width must be a multiple of 32
};

// t runs over the rows of the batch: n_tokens before SELECT, n_outputs after it. Buffers are f32 [rows][width].
enum meshllm_opcode {
    MESHLLM_OP_EMBED = 0,     // out[t] = dequantized row token[t] of table `weight`
    MESHLLM_OP_RMSNORM = 1,   // out[t] = in[t] / sqrt(mean(in[t]^2) + f0) * weight, over groups of `a` values
    MESHLLM_OP_QUANTIZE = 2,  // out (Q8 buffer) = int8 blocks of 32 of in
    MESHLLM_OP_MATMUL = 3,    // out[t][row] = sum over k of weight[row][k] * in[t][k]; in is Q8 for quantized weights, F32 for F16/F32
    MESHLLM_OP_BIAS = 4,      // out[t] += weight
    MESHLLM_OP_ROPE = 5,      // out[t] rotated in place: a heads of b values, the first 2 * len(weight) of each; weight = frequencies
                              // (radians a position); c = 0: pairs (2i, 2i+1), 1: pairs (i, i + len(weight)); f0 scales cos and sin
    MESHLLM_OP_KV_APPEND = 6, // layer a: cache[slot[t]][position[t]] = in (keys), in2 (values), as f16
    MESHLLM_OP_ATTENTION = 7, // layer a: out[t] = softmax(f0 * q K^T, soft cap f1 if > 0) V over positions <= position[t] of slot[t],
                              // the last c of them only if c > 0; in = queries; query head h reads KV head (h + b) / group
    MESHLLM_OP_GATE = 8,      // out[t] = act(in[t]) * in2[t]; a = 0: silu, 1: gelu (tanh form)
    MESHLLM_OP_ADD = 9,       // out[t] += in[t]
    MESHLLM_OP_SCALE = 10,    // out[t] *= f0; then f1 * tanh(out[t] / f1) if f1 > 0
    MESHLLM_OP_EXCHANGE = 11, // stop; later out[t] += partials of all ranks in rank order; in = this rank's partial, or NONE if it adds nothing;
                              // a = 1: out[t] = their sum
    MESHLLM_OP_SELECT = 12,   // out[i] = in[outputs[i]]; from here on rows are the batch's outputs
};

enum meshllm_buffer_kind { MESHLLM_BUFFER_F32 = 0, MESHLLM_BUFFER_Q8 = 1 };

enum meshllm_weight_kind {
    MESHLLM_WEIGHT_PACKED = 0, // from meshllm_pack: MATMUL
    MESHLLM_WEIGHT_TABLE = 1,  // rows as they stand in the file: EMBED
    MESHLLM_WEIGHT_VECTOR = 2, // f32 [n_cols]: RMSNORM, BIAS, ROPE
};

struct meshllm_op { // unused operands are MESHLLM_NONE, unused numbers 0
    uint32_t opcode;
    uint32_t out;    // buffer index
    uint32_t in;     // buffer index
    uint32_t in2;    // buffer index
    uint32_t weight; // weight index
    uint32_t a, b, c;
    float f0, f1;
};

struct meshllm_buffer { uint32_t kind, width; };

struct meshllm_weight {
    uint32_t kind, format;
    uint32_t n_rows, n_cols;
    size_t size; // bytes at data
    const void *data;
};

struct meshllm_cache_shape { // of this rank; the cache is allocated with the program, its pages are touched as used
    uint32_t n_layers, n_slots, n_positions, n_kv_heads, head_dim;
    uint32_t group; // query heads that share a KV head
};

struct meshllm_fault { // why program_new refused
    uint32_t op;        // index of the op, or MESHLLM_NONE
    const char *reason; // static text
};

struct meshllm_engine;  // kernels of one ISA and a pool of threads
struct meshllm_program; // a validated program with its buffers and KV cache

// isa: "" for the best that runs here, or a name of meshllm_isa_name. n_threads >= 1, the caller's included.
int meshllm_engine_new(struct meshllm_engine **engine, const char *isa, uint32_t n_threads);
void meshllm_engine_free(struct meshllm_engine *engine);
const char *meshllm_engine_isa(const struct meshllm_engine *engine);
uint32_t meshllm_engine_threads(const struct meshllm_engine *engine);
// ISAs compiled in, best first: name, or NULL at the end; whether it runs here: 1 or 0.
const char *meshllm_isa_name(uint32_t index);
int meshllm_isa_runs(uint32_t index);

// Bytes of a packed matrix of n_rows x n_cols; 0 if the format is unknown or n_cols is no multiple of its block.
size_t meshllm_packed_size(const struct meshllm_engine *engine, uint32_t format, uint32_t n_rows, uint32_t n_cols);
// Packs rows [row, row + n_rows) and columns [col, col + n_cols) of a file's tensor with file_cols columns.
// packed: meshllm_packed_size bytes, 64-byte aligned. size: bytes at tensor. Column cuts fall on blocks of the format.
int meshllm_pack(const struct meshllm_engine *engine, void *packed, uint32_t format, uint32_t row, uint32_t n_rows,
                 uint32_t col, uint32_t n_cols, uint32_t file_cols, size_t size, const void *tensor);
// out: f32 [n_cols], the values of one row of a file's tensor. 0 bytes are read past n_cols values.
int meshllm_dequantize_row(uint32_t format, float *out, uint32_t n_cols, const void *row);
// One matrix product outside a program (tests, benchmarks): out f32 [n_tokens][n_rows], in f32 [n_tokens][n_cols], quantized inside if need be.
int meshllm_matmul(struct meshllm_engine *engine, float *out, const struct meshllm_weight *weight, uint32_t n_tokens, const float *in);

int meshllm_program_new(struct meshllm_program **program, struct meshllm_engine *engine, uint32_t n_ops, const struct meshllm_op *ops,
                        uint32_t n_buffers, const struct meshllm_buffer *buffers, uint32_t n_weights, const struct meshllm_weight *weights,
                        const struct meshllm_cache_shape *cache, uint32_t max_tokens, uint32_t precision, struct meshllm_fault *fault);
void meshllm_program_free(struct meshllm_program *program);
// Starts a batch: int32 tokens, positions, slots [n_tokens]; outputs: n_outputs row numbers, growing. All are copied.
int meshllm_program_begin(struct meshllm_program *program, uint32_t n_tokens, const int32_t *tokens, const int32_t *positions,
                          const int32_t *slots, uint32_t n_outputs, const int32_t *outputs);
// Runs to the next EXCHANGE (MESHLLM_EXCHANGE), to the end (MESHLLM_OK), or until stopped.
int meshllm_program_run(struct meshllm_program *program);
// This rank's partial at an EXCHANGE, encoded for the wire; *size 0 if it adds nothing. Valid until supply.
const void *meshllm_program_partial(struct meshllm_program *program, size_t *size);
// Adds the encoded partials, this rank's own among them, in the order given; each of partial_size bytes.
int meshllm_program_supply(struct meshllm_program *program, uint32_t n_partials, const void *const *partials);
size_t meshllm_program_partial_size(const struct meshllm_program *program); // of the running batch
// While it waits at an EXCHANGE: reads a little of the weights that come next into the caches, which takes some microseconds;
// returns how many bytes, 0 when caches should take no more.
size_t meshllm_program_read_ahead(struct meshllm_program *program);
// f32 [rows][width] of a buffer of the running batch; NULL if there is none such.
float *meshllm_program_buffer(struct meshllm_program *program, uint32_t buffer);
void meshllm_program_stop(struct meshllm_program *program); // from any thread: run returns within one op; cleared by begin
// Copies positions [0, n) of a slot's cache to another slot.
int meshllm_program_copy_slot(struct meshllm_program *program, uint32_t to, uint32_t from, uint32_t n);
size_t meshllm_program_cache_size(const struct meshllm_program *program);

struct meshllm_link;         // sealed frames on a socket
struct meshllm_communicator; // the ranks that run one program's steps together

// A link on a connected socket, which stays the caller's and must outlive it. Keys of 32 bytes; aes: AES-256-GCM, else ChaCha20-Poly1305.
// No function of a link waits.
int meshllm_link_new(struct meshllm_link **link, int fd, uint32_t aes, const uint8_t *send_key, const uint8_t *receive_key);
void meshllm_link_free(struct meshllm_link *link);
void meshllm_link_close(struct meshllm_link *link); // its socket is about to be closed: nothing is sent or received from now on
void meshllm_link_limit(struct meshllm_link *link, size_t frame_limit); // bytes of the largest body that may come
// Seals a body as the next frame and sends what the socket takes; flush sends the rest.
int meshllm_link_send(struct meshllm_link *link, size_t n, const void *body);
int meshllm_link_flush(struct meshllm_link *link);
// The next body, valid until the next call; or MESHLLM_NOTHING; or MESHLLM_PARTIAL, and it stays.
int meshllm_link_receive(struct meshllm_link *link, const uint8_t **body, size_t *n);
size_t meshllm_link_unsent(const struct meshllm_link *link); // bytes that the socket has not taken
uint64_t meshllm_link_sent(const struct meshllm_link *link); // bytes so far, with lengths and tags; unsent ones too
uint64_t meshllm_link_received(const struct meshllm_link *link);
int64_t meshllm_link_detail(const struct meshllm_link *link, int status);

// links [n_ranks], NULL at `own`; adds [n_exchanges][n_ranks]: 1 where a rank adds something. Links and program must outlive it.
int meshllm_communicator_new(struct meshllm_communicator **communicator, struct meshllm_program *program, uint32_t n_ranks, uint32_t own,
                             struct meshllm_link *const *links, uint32_t n_exchanges, const uint8_t *adds);
void meshllm_communicator_free(struct meshllm_communicator *communicator);
void meshllm_communicator_begin(struct meshllm_communicator *communicator, uint64_t step); // after program_begin
// Runs the program to its end (MESHLLM_OK), with all its exchanges. Returns before, to be called again, where a partial does not come:
// MESHLLM_EXCHANGE after yield_us, of which it looks again at once for spin_us and offers its core to others from then on; or
// MESHLLM_MESSAGE, which link_receive gives. communicator_rank tells whose link a message or a failure is about.
int meshllm_communicator_run(struct meshllm_communicator *communicator, uint32_t spin_us, uint32_t yield_us);
uint32_t meshllm_communicator_rank(const struct meshllm_communicator *communicator);
uint32_t meshllm_communicator_exchange(const struct meshllm_communicator *communicator); // that is due, counted from 0 in a step
uint32_t meshllm_communicator_lacks(const struct meshllm_communicator *communicator, uint32_t rank); // 1 if this rank's partial is missing
uint64_t meshllm_communicator_exchange_ns(const struct meshllm_communicator *communicator); // in exchanges, in this step

// log(sum(exp(logits))) over n values.
double meshllm_log_sum_exp(uint32_t n, const float *logits);
// The k largest of n logits, largest first, ties by lower index: indices and values. Returns how many (min(k, n)); NaN is never chosen.
uint32_t meshllm_top_k(uint32_t k, uint32_t *indices, float *values, uint32_t n, const float *logits);
// noise[i] = Gumbel(0, 1) noise of (seed, position, ids[i]): counter-based, the same on every machine to within rounding.
void meshllm_gumbel(uint64_t seed, uint32_t position, uint32_t n, const uint32_t *ids, double *noise);
// argmax over i of logits[i] / temperature + noise(seed, position, first_id + i); the winner's perturbed value in *value.
uint32_t meshllm_gumbel_argmax(uint64_t seed, uint32_t position, uint32_t first_id, double temperature, uint32_t n, const float *logits, double *value);

// A read of a mapped file that fails (the file was cut short, its disk is broken) ends the process, unless the map is guarded: it then
// reads as zeros from there to its end, and meshllm_lost_maps() counts one more. map: at a page; at most 16 at a time; for any thread.
int meshllm_guard_map(const void *map, size_t size);
void meshllm_unguard_map(const void *map);
uint64_t meshllm_lost_maps(void);

// Bytes a second of the fastest read this engine's threads reach over size bytes (a multiple of 64) at data, as the matmul kernels read.
double meshllm_measure_bandwidth(struct meshllm_engine *engine, size_t size, const void *data, double min_seconds);
/* cdef: end */
#endif
