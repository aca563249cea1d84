// Links and communicators: frames whole and cut, forged, doubled and too long; partial sums of two ranks in any order of arrival.
#include <sys/socket.h>

#include "../link.h"
#include "../partial_frame.h"
#include "check.h"

enum { LIMIT = 1 << 20, WIDTH = 64, N_EXCHANGES = 3 };
static const uint8_t key_a[CIPHER_KEY] = {1}, key_b[CIPHER_KEY] = {2};

struct pair {
    int fd[2];
    struct meshllm_link *link[2];
};

static struct pair pair_new(uint32_t aes) {
    struct pair p;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, p.fd));
    CHECK(meshllm_link_new(&p.link[0], p.fd[0], aes, key_a, key_b) == MESHLLM_OK);
    CHECK(meshllm_link_new(&p.link[1], p.fd[1], aes, key_b, key_a) == MESHLLM_OK);
    for (int i = 0; i < 2; i++) meshllm_link_limit(p.link[i], LIMIT);
    return p;
}

static void pair_free(struct pair *p) {
    for (int i = 0; i < 2; i++) meshllm_link_free(p->link[i]), close(p->fd[i]);
}

static void test_bodies_of_all_sizes_arrive(uint32_t aes) {
    struct pair p = pair_new(aes);
    static uint8_t sent[LIMIT];
    uint64_t seed = 5;
    for (size_t i = 0; i < sizeof sent; i++) sent[i] = (uint8_t)noise(&seed);
    size_t sizes[] = {0, 1, 4096, 70000, 3, LIMIT, 12};
    for (int i = 0; i < 7; i++) CHECK(meshllm_link_send(p.link[0], sizes[i], sent) == MESHLLM_OK);
    CHECK(meshllm_link_unsent(p.link[0]) > 0);
    for (int i = 0; i < 7;) {
        const uint8_t *body;
        size_t n;
        CHECK(meshllm_link_flush(p.link[0]) == MESHLLM_OK);
        int status = meshllm_link_receive(p.link[1], &body, &n);
        if (status == MESHLLM_NOTHING) continue;
        CHECK(status == MESHLLM_OK && n == sizes[i] && !memcmp(body, sent, n), "body %d", i);
        i++;
    }
    CHECK(!meshllm_link_unsent(p.link[0]) && meshllm_link_sent(p.link[0]) == meshllm_link_received(p.link[1]));
    pair_free(&p);
}

static int status_of(struct pair *p, size_t n, const uint8_t *wire) {
    const uint8_t *body;
    size_t size;
    CHECK(!n || send(p->fd[0], wire, n, 0) == (ssize_t)n);
    return meshllm_link_receive(p->link[1], &body, &size);
}

static void test_what_is_no_frame_of_the_other_end_is_refused(void) {
    uint8_t wire[256];
    for (int spoiled = 4; spoiled < 40; spoiled += 7) {
        struct pair p = pair_new(1);
        CHECK(meshllm_link_send(p.link[0], 20, "what a peer would say") == MESHLLM_OK);
        ssize_t n = recv(p.fd[1], wire, sizeof wire, 0);
        CHECK(n == 4 + 20 + CIPHER_TAG && !memmem(wire, (size_t)n, "peer", 4));
        wire[spoiled] ^= 1;
        CHECK(status_of(&p, (size_t)n, wire) == MESHLLM_FORGED);
        pair_free(&p);
    }
    uint32_t lengths[] = {0, CIPHER_TAG - 1, LIMIT + CIPHER_TAG + 1, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        struct pair p = pair_new(1);
        CHECK(status_of(&p, sizeof lengths[i], (const uint8_t *)&lengths[i]) == MESHLLM_BAD_LENGTH);
        CHECK(meshllm_link_detail(p.link[1], MESHLLM_BAD_LENGTH) == lengths[i]);
        pair_free(&p);
    }
    struct pair p = pair_new(1); // doubled
    CHECK(meshllm_link_send(p.link[0], 4, "once") == MESHLLM_OK);
    ssize_t n = recv(p.fd[1], wire, sizeof wire, 0);
    CHECK(status_of(&p, (size_t)n, wire) == MESHLLM_OK);
    CHECK(status_of(&p, (size_t)n, wire) == MESHLLM_FORGED);
    pair_free(&p);
    p = pair_new(1);
    shutdown(p.fd[0], SHUT_RDWR);
    CHECK(status_of(&p, 0, wire) == MESHLLM_LINK_CLOSED);
    CHECK(meshllm_link_send(p.link[1], 4, "gone") == MESHLLM_LINK_FAILED);
    meshllm_link_close(p.link[0]); // its descriptor may be another's by now
    CHECK(meshllm_link_send(p.link[0], 4, "gone") == MESHLLM_LINK_FAILED);
    pair_free(&p);
}

// --- communicators: programs of nothing but exchanges

struct rank {
    struct meshllm_program *program;
    struct meshllm_communicator *communicator;
};

static struct rank rank_new(struct meshllm_engine *engine, uint32_t own, struct meshllm_link *link, const uint8_t *adds) {
    struct meshllm_op ops[N_EXCHANGES];
    for (int i = 0; i < N_EXCHANGES; i++) {
        uint32_t in = adds[2 * i + (int)own] ? 1 : MESHLLM_NONE;
        ops[i] = (struct meshllm_op){MESHLLM_OP_EXCHANGE, 0, in, MESHLLM_NONE, MESHLLM_NONE, 0, 0, 0, 0, 0};
    }
    struct meshllm_buffer buffers[] = {{MESHLLM_BUFFER_F32, WIDTH}, {MESHLLM_BUFFER_F32, WIDTH}};
    struct meshllm_cache_shape cache = {1, 1, 8, 1, 16, 1};
    struct meshllm_fault fault;
    struct rank r;
    CHECK(meshllm_program_new(&r.program, engine, N_EXCHANGES, ops, 2, buffers, 0, NULL, &cache, 4, MESHLLM_PARTIAL_F32, &fault) ==
              MESHLLM_OK, "%s", fault.reason);
    struct meshllm_link *links[2] = {own ? link : NULL, own ? NULL : link};
    CHECK(meshllm_communicator_new(&r.communicator, r.program, 2, own, links, N_EXCHANGES, adds) == MESHLLM_OK);
    return r;
}

static void rank_begin(struct rank *r, uint64_t step, float value) {
    int32_t zeros[2] = {0}, positions[2] = {0, 1};
    CHECK(meshllm_program_begin(r->program, 2, zeros, positions, zeros, 0, NULL) == MESHLLM_OK);
    for (int i = 0; i < 2 * WIDTH; i++) {
        meshllm_program_buffer(r->program, 0)[i] = 0;
        meshllm_program_buffer(r->program, 1)[i] = value;
    }
    meshllm_communicator_begin(r->communicator, step);
}

static void rank_free(struct rank *r) {
    meshllm_communicator_free(r->communicator);
    meshllm_program_free(r->program);
}

static void test_ranks_add_the_same(struct meshllm_engine *engine) {
    struct pair p = pair_new(1);
    uint8_t adds[2 * N_EXCHANGES] = {1, 1, 1, 0, 1, 1}; // rank 1 adds nothing at exchange 1
    struct rank ranks[2] = {rank_new(engine, 0, p.link[0], adds), rank_new(engine, 1, p.link[1], adds)};
    for (uint64_t step = 0; step < 3; step++) {
        for (int i = 0; i < 2; i++) rank_begin(&ranks[i], step, 1.0f + 10.0f * (float)i);
        int done[2] = {MESHLLM_EXCHANGE, MESHLLM_EXCHANGE}, turns = 0;
        while (done[0] || done[1]) {
            int i = turns++ % 3 == 2; // in turns of unequal length
            if (done[i]) done[i] = meshllm_communicator_run(ranks[i].communicator, 0, 0);
            CHECK(done[i] == MESHLLM_OK || done[i] == MESHLLM_EXCHANGE, "%d", done[i]);
            CHECK(turns < 100);
        }
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 2 * WIDTH; k++) CHECK(meshllm_program_buffer(ranks[i].program, 0)[k] == 3 * 1 + 2 * 11, "%d", k);
    }
    rank_free(&ranks[0]), rank_free(&ranks[1]), pair_free(&p);
}

static void test_what_is_not_due_is_told(struct meshllm_engine *engine) {
    struct { uint64_t step; uint32_t exchange; size_t size; } wrong[] = {{1, 0, 512}, {0, 1, 512}, {0, 0, 508}, {0, 0, 0}};
    uint8_t adds[2 * N_EXCHANGES] = {1, 1, 1, 1, 1, 1}, head[PARTIAL_HEAD], data[512] = {0};
    const uint8_t *body;
    size_t n;
    for (int i = 0; i < 4; i++) {
        struct pair p = pair_new(1);
        struct rank r = rank_new(engine, 0, p.link[0], adds);
        partial_head(head, wrong[i].step, wrong[i].exchange, wrong[i].size);
        CHECK(link_send(p.link[1], sizeof head, head, wrong[i].size, data) == MESHLLM_OK);
        CHECK(meshllm_link_receive(p.link[0], &body, &n) == MESHLLM_PARTIAL); // in no step: it stays
        rank_begin(&r, 0, 1);
        CHECK(meshllm_communicator_run(r.communicator, 0, 0) == MESHLLM_WRONG_PARTIAL && meshllm_communicator_rank(r.communicator) == 1);
        rank_free(&r), pair_free(&p);
    }
    struct pair p = pair_new(1);
    struct rank r = rank_new(engine, 0, p.link[0], adds);
    rank_begin(&r, 0, 1);
    CHECK(meshllm_communicator_run(r.communicator, 5, 20) == MESHLLM_EXCHANGE && meshllm_communicator_lacks(r.communicator, 1));
    CHECK(meshllm_link_send(p.link[1], 5, "leave") == MESHLLM_OK);
    CHECK(meshllm_communicator_run(r.communicator, 0, 0) == MESHLLM_MESSAGE && meshllm_communicator_rank(r.communicator) == 1);
    CHECK(meshllm_link_receive(p.link[0], &body, &n) == MESHLLM_OK && n == 5 && !memcmp(body, "leave", 5));
    CHECK(meshllm_communicator_run(r.communicator, 0, 0) == MESHLLM_EXCHANGE);
    meshllm_program_stop(r.program);
    CHECK(meshllm_communicator_run(r.communicator, 1000000, 1000000) == MESHLLM_STOPPED);
    rank_begin(&r, 1, 1);
    shutdown(p.fd[1], SHUT_RDWR);
    CHECK(meshllm_communicator_run(r.communicator, 0, 0) == MESHLLM_LINK_FAILED && meshllm_communicator_rank(r.communicator) == 1);
    rank_free(&r), pair_free(&p);
}

int main(void) {
    if (!cipher_available()) {
        puts("left out: no libcrypto.so.3");
        return 0;
    }
    test_bodies_of_all_sizes_arrive(1);
    test_bodies_of_all_sizes_arrive(0);
    test_what_is_no_frame_of_the_other_end_is_refused();
    struct meshllm_engine *engine;
    CHECK(meshllm_engine_new(&engine, "", 1) == MESHLLM_OK);
    test_ranks_add_the_same(engine);
    test_what_is_not_due_is_told(engine);
    meshllm_engine_free(engine);
    return 0;
}
