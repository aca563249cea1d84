// AEAD of data links, by OpenSSL's libcrypto. It is opened at run time, by the name under which Python's own ssl module brings it along, so
// that neither a header nor a library is needed to build.
#ifndef MESHLLM_CIPHER_H
#define MESHLLM_CIPHER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CIPHER_KEY = 32, CIPHER_TAG = 16 };

struct cipher { // one direction of one link; nonces count up from 0
    void *context;
    uint64_t n_frames;
    bool seals;
};

bool cipher_available(void); // thread-safe
bool cipher_make(struct cipher *cipher, bool aes, bool seals, const uint8_t *key);
void cipher_free(struct cipher *cipher);
// out = head and body sealed, then the tag: n_head + n + CIPHER_TAG bytes, n_head + n < 2^31. False if libcrypto fails.
bool cipher_seal(struct cipher *cipher, uint8_t *out, size_t n_head, const void *head, size_t n, const void *body);
// Opens n bytes and the tag behind them in place; false if they are not what the other end sealed.
bool cipher_open(struct cipher *cipher, size_t n, uint8_t *sealed);
#endif
