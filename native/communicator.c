// The ranks of a step: a program is run to its end, its partial sums exchanged all-to-all over links, in one call where all are in time.
//
// Between two exchanges the weights of a layer pass through the caches, so whatever an exchange needs is cold: the same work took six
// times as long in an interpreter.
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "link.h"
#include "partial_frame.h"
#include "program.h"

struct meshllm_communicator {
    struct meshllm_program *program;
    uint32_t n_ranks, own, n_exchanges;
    struct meshllm_link **links; // [n_ranks]; NULL at own
    uint8_t *adds;               // [n_exchanges][n_ranks]: whether this rank adds something there
    const void **partials;       // [n_ranks] of this exchange that have come
    uint64_t step;
    uint32_t exchange;
    bool waiting;     // in an exchange, which began at began_ns
    uint32_t at_rank; // whom the last status is about
    uint64_t began_ns, exchange_ns;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int meshllm_communicator_new(struct meshllm_communicator **made, struct meshllm_program *program, uint32_t n_ranks, uint32_t own,
                             struct meshllm_link *const *links, uint32_t n_exchanges, const uint8_t *adds) {
    *made = NULL;
    if (own >= n_ranks || n_exchanges > UINT16_MAX) return MESHLLM_BAD_ARGUMENT;
    struct meshllm_communicator *c = calloc(1, sizeof *c);
    if (!c) return MESHLLM_NO_MEMORY;
    c->program = program, c->n_ranks = n_ranks, c->own = own, c->n_exchanges = n_exchanges;
    c->links = calloc(n_ranks, sizeof *c->links);
    c->partials = calloc(n_ranks, sizeof *c->partials);
    c->adds = calloc((size_t)n_exchanges + 1, n_ranks);
    if (!c->links || !c->partials || !c->adds) {
        meshllm_communicator_free(c);
        return MESHLLM_NO_MEMORY;
    }
    memcpy(c->links, links, n_ranks * sizeof *links);
    memcpy(c->adds, adds, (size_t)n_exchanges * n_ranks);
    *made = c;
    return MESHLLM_OK;
}

void meshllm_communicator_free(struct meshllm_communicator *c) {
    if (!c) return;
    free(c->links), free(c->partials), free(c->adds);
    free(c);
}

void meshllm_communicator_begin(struct meshllm_communicator *c, uint64_t step) {
    c->step = step, c->exchange = 0, c->waiting = false, c->exchange_ns = 0;
}

uint32_t meshllm_communicator_exchange(const struct meshllm_communicator *c) { return c->exchange; }
uint32_t meshllm_communicator_rank(const struct meshllm_communicator *c) { return c->at_rank; }
uint64_t meshllm_communicator_exchange_ns(const struct meshllm_communicator *c) { return c->exchange_ns; }

static bool adds(const struct meshllm_communicator *c, uint32_t rank) { return c->adds[(size_t)c->exchange * c->n_ranks + rank]; }

uint32_t meshllm_communicator_lacks(const struct meshllm_communicator *c, uint32_t rank) {
    return c->waiting && rank < c->n_ranks && adds(c, rank) && !c->partials[rank];
}

static int send_own(struct meshllm_communicator *c) {
    uint8_t head[PARTIAL_HEAD];
    size_t size;
    const void *partial = meshllm_program_partial(c->program, &size);
    if (!size) return MESHLLM_OK;
    partial_head(head, c->step, c->exchange, size);
    for (c->at_rank = 0; c->at_rank < c->n_ranks; c->at_rank++) {
        if (c->at_rank == c->own) continue;
        int status = link_send(c->links[c->at_rank], sizeof head, head, size, partial);
        if (status != MESHLLM_OK) return status;
    }
    c->partials[c->own] = partial;
    return MESHLLM_OK;
}

static int begin_exchange(struct meshllm_communicator *c) {
    if (c->exchange >= c->n_exchanges) return MESHLLM_BAD_ARGUMENT;
    c->began_ns = now_ns();
    c->waiting = true;
    memset(c->partials, 0, c->n_ranks * sizeof *c->partials);
    return send_own(c);
}

// The partial of a rank, if it has come.
static int take(struct meshllm_communicator *c, uint32_t rank, const uint8_t *head, size_t size) {
    const uint8_t *body;
    size_t n;
    int status = link_receive(c->links[rank], &body, &n);
    if (status != MESHLLM_OK) return status;
    if (n == PARTIAL_HEAD + size && !memcmp(body, head, PARTIAL_HEAD)) {
        c->partials[rank] = body + PARTIAL_HEAD; // stays there: nothing more is read from this link before it is added
        return MESHLLM_OK;
    }
    link_hold(c->links[rank], body, n);
    return is_partial(body, n) ? MESHLLM_WRONG_PARTIAL : MESHLLM_MESSAGE;
}

// Sends and receives what can be at once. MESHLLM_NOTHING: something is still on its way.
static int advance(struct meshllm_communicator *c, const uint8_t *head, size_t size) {
    int result = MESHLLM_OK;
    for (uint32_t rank = 0; rank < c->n_ranks; rank++) {
        if (rank == c->own) continue;
        int status = meshllm_link_unsent(c->links[rank]) ? meshllm_link_flush(c->links[rank]) : MESHLLM_OK;
        if (status == MESHLLM_OK && meshllm_communicator_lacks(c, rank)) status = take(c, rank, head, size);
        if (status == MESHLLM_OK && meshllm_link_unsent(c->links[rank])) status = MESHLLM_NOTHING;
        if (status == MESHLLM_NOTHING) result = status;
        else if (status != MESHLLM_OK) {
            c->at_rank = rank;
            return status;
        }
    }
    return result;
}

static int finish_exchange(struct meshllm_communicator *c) {
    uint32_t n = 0;
    for (uint32_t rank = 0; rank < c->n_ranks; rank++)
        if (c->partials[rank]) c->partials[n++] = c->partials[rank];
    int status = meshllm_program_supply(c->program, n, c->partials);
    c->exchange_ns += now_ns() - c->began_ns;
    c->waiting = false;
    c->exchange++;
    return status;
}

static int exchange(struct meshllm_communicator *c, uint64_t spin_ns, uint64_t yield_ns) {
    uint64_t since = 0;
    size_t size = meshllm_program_partial_size(c->program);
    uint8_t head[PARTIAL_HEAD];
    partial_head(head, c->step, c->exchange, size);
    for (;;) {
        int status = advance(c, head, size);
        if (status != MESHLLM_NOTHING) return status == MESHLLM_OK ? finish_exchange(c) : status;
        if (atomic_load_explicit(&c->program->stopped, memory_order_relaxed)) return MESHLLM_STOPPED;
        if (meshllm_program_read_ahead(c->program)) continue;
        uint64_t now = now_ns();
        since = since ? since : now;
        if (now - since >= yield_ns) return MESHLLM_EXCHANGE;
        if (now - since >= spin_ns) sched_yield();
    }
}

int meshllm_communicator_run(struct meshllm_communicator *c, uint32_t spin_us, uint32_t yield_us) {
    for (;;) {
        int status = c->waiting ? MESHLLM_EXCHANGE : meshllm_program_run(c->program);
        if (status != MESHLLM_EXCHANGE) return status;
        if (!c->waiting) status = begin_exchange(c);
        if (status == MESHLLM_EXCHANGE || status == MESHLLM_OK) status = exchange(c, 1000u * (uint64_t)spin_us, 1000u * (uint64_t)yield_us);
        if (status != MESHLLM_OK) return status;
    }
}
