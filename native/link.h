// A data link: sealed frames on a connected socket. A frame is u32 little-endian length, then the sealed body. Nothing here waits.
#ifndef MESHLLM_LINK_H
#define MESHLLM_LINK_H
#include "cipher.h"
#include "meshllm.h"

struct bytes { // [start, end) of size
    uint8_t *data;
    size_t size, start, end;
};

struct meshllm_link {
    int fd;
    struct cipher sealing, opening;
    struct bytes out, in; // sealed and unsent; received, the next bodies
    size_t frame_limit;   // bytes of a body
    uint64_t sent, received;
    int error;            // errno of MESHLLM_LINK_FAILED
    size_t bad_length;    // of MESHLLM_BAD_LENGTH
    const uint8_t *held;  // a body in `in` that was opened and not taken
    size_t held_size;
};

// Seals head and body as one frame and sends what the socket takes.
int link_send(struct meshllm_link *link, size_t n_head, const void *head, size_t n, const void *body);
// The next body, in place and valid until the next call; MESHLLM_NOTHING if there is no whole one yet.
int link_receive(struct meshllm_link *link, const uint8_t **body, size_t *n);
// Puts the body that link_receive gave last back, to be given again.
void link_hold(struct meshllm_link *link, const uint8_t *body, size_t n);
#endif
