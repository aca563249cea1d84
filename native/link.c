#include "link.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "partial_frame.h"

enum { LENGTH = 4, FIRST_BUFFER = 65536 }; // a buffer grows to the largest frame that came

// Room for n more bytes behind `end`, if need be by moving what is there to the front or to a larger buffer.
static bool make_room(struct bytes *bytes, size_t n) {
    if (n <= bytes->size - bytes->end) return true;
    size_t used = bytes->end - bytes->start, needed = used + n;
    if (needed > bytes->size) {
        uint8_t *data = malloc(needed);
        if (!data) return false;
        if (used) memcpy(data, bytes->data + bytes->start, used);
        free(bytes->data);
        bytes->data = data, bytes->size = needed;
    } else {
        memmove(bytes->data, bytes->data + bytes->start, used);
    }
    bytes->start = 0, bytes->end = used;
    return true;
}

int meshllm_link_new(struct meshllm_link **made, int fd, uint32_t aes, const uint8_t *send_key, const uint8_t *receive_key) {
    *made = NULL;
    if (!cipher_available()) return MESHLLM_NO_CIPHER;
    struct meshllm_link *link = calloc(1, sizeof *link);
    if (!link) return MESHLLM_NO_MEMORY;
    link->fd = fd;
    if (!cipher_make(&link->sealing, aes, true, send_key) || !cipher_make(&link->opening, aes, false, receive_key) ||
        !make_room(&link->in, FIRST_BUFFER) || !make_room(&link->out, FIRST_BUFFER)) {
        meshllm_link_free(link);
        return MESHLLM_NO_MEMORY;
    }
    *made = link;
    return MESHLLM_OK;
}

void meshllm_link_free(struct meshllm_link *link) {
    if (!link) return;
    cipher_free(&link->sealing), cipher_free(&link->opening);
    free(link->in.data), free(link->out.data);
    free(link);
}

void meshllm_link_close(struct meshllm_link *link) { link->fd = -1; } // EBADF, whoever has the number next

void meshllm_link_limit(struct meshllm_link *link, size_t frame_limit) {
    link->frame_limit = frame_limit < INT_MAX / 2 ? frame_limit : INT_MAX / 2;
}

size_t meshllm_link_unsent(const struct meshllm_link *link) { return link->out.end - link->out.start; }
uint64_t meshllm_link_sent(const struct meshllm_link *link) { return link->sent; }
uint64_t meshllm_link_received(const struct meshllm_link *link) { return link->received; }
int64_t meshllm_link_detail(const struct meshllm_link *link, int status) {
    return status == MESHLLM_BAD_LENGTH ? (int64_t)link->bad_length : link->error;
}

static int failed(struct meshllm_link *link) {
    link->error = errno;
    return MESHLLM_LINK_FAILED;
}

int meshllm_link_flush(struct meshllm_link *link) {
    struct bytes *out = &link->out;
    while (out->start < out->end) {
        ssize_t n = send(link->fd, out->data + out->start, out->end - out->start, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? MESHLLM_OK : failed(link);
        out->start += (size_t)n;
    }
    out->start = out->end = 0;
    return MESHLLM_OK;
}

int link_send(struct meshllm_link *link, size_t n_head, const void *head, size_t n, const void *body) {
    size_t sealed = n_head + n + CIPHER_TAG;
    if (n > INT_MAX / 2 || n_head > INT_MAX / 2) return MESHLLM_BAD_ARGUMENT;
    if (!make_room(&link->out, LENGTH + sealed)) return MESHLLM_NO_MEMORY;
    uint8_t *frame = link->out.data + link->out.end;
    for (int i = 0; i < LENGTH; i++) frame[i] = (uint8_t)(sealed >> (8 * i));
    if (!cipher_seal(&link->sealing, frame + LENGTH, n_head, head, n, body)) return MESHLLM_NO_MEMORY;
    link->out.end += LENGTH + sealed;
    link->sent += LENGTH + sealed;
    return meshllm_link_flush(link);
}

int meshllm_link_send(struct meshllm_link *link, size_t n, const void *body) { return link_send(link, 0, "", n, body); }

// The next body, if all of it has been read.
static int next_body(struct meshllm_link *link, const uint8_t **body, size_t *n) {
    struct bytes *in = &link->in;
    size_t unread = in->end - in->start, length = 0;
    if (unread < LENGTH) return make_room(in, LENGTH) ? MESHLLM_NOTHING : MESHLLM_NO_MEMORY;
    uint8_t *frame = in->data + in->start;
    for (int i = 0; i < LENGTH; i++) length |= (size_t)frame[i] << (8 * i);
    if (length < CIPHER_TAG || length > link->frame_limit + CIPHER_TAG) {
        link->bad_length = length;
        return MESHLLM_BAD_LENGTH;
    }
    if (unread < LENGTH + length) return make_room(in, LENGTH + length - unread) ? MESHLLM_NOTHING : MESHLLM_NO_MEMORY;
    if (!cipher_open(&link->opening, length - CIPHER_TAG, frame + LENGTH)) return MESHLLM_FORGED;
    *body = frame + LENGTH, *n = length - CIPHER_TAG;
    in->start += LENGTH + length;
    if (in->start == in->end) in->start = in->end = 0; // the bytes stay where they are
    return MESHLLM_OK;
}

int link_receive(struct meshllm_link *link, const uint8_t **body, size_t *n) {
    if (link->held) {
        *body = link->held, *n = link->held_size;
        link->held = NULL;
        return MESHLLM_OK;
    }
    for (;;) {
        int status = next_body(link, body, n);
        if (status != MESHLLM_NOTHING) return status;
        ssize_t n_read = recv(link->fd, link->in.data + link->in.end, link->in.size - link->in.end, MSG_DONTWAIT);
        if (n_read < 0 && errno == EINTR) continue;
        if (n_read < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? MESHLLM_NOTHING : failed(link);
        if (n_read == 0) return MESHLLM_LINK_CLOSED;
        link->in.end += (size_t)n_read;
        link->received += (uint64_t)n_read;
    }
}

void link_hold(struct meshllm_link *link, const uint8_t *body, size_t n) { link->held = body, link->held_size = n; }

int meshllm_link_receive(struct meshllm_link *link, const uint8_t **body, size_t *n) {
    int status = link_receive(link, body, n);
    if (status != MESHLLM_OK || !is_partial(*body, *n)) return status;
    link_hold(link, *body, *n);
    return MESHLLM_PARTIAL;
}
