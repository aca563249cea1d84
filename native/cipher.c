#include "cipher.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

enum { NONCE = 12, CTRL_GET_TAG = 0x10, CTRL_SET_TAG = 0x11 }; // EVP_CTRL_AEAD_*

static struct { // of OpenSSL 3, whose ABI is kept for all of 3.x
    void *(*context_new)(void);
    void (*context_free)(void *);
    const void *(*aes_256_gcm)(void);
    const void *(*chacha20_poly1305)(void);
    int (*init)(void *, const void *cipher, void *engine, const uint8_t *key, const uint8_t *nonce, int seals);
    int (*update)(void *, uint8_t *out, int *n_out, const uint8_t *in, int n);
    int (*final)(void *, uint8_t *out, int *n_out);
    int (*ctrl)(void *, int type, int n, void *);
} evp;
static bool found_all;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void *library, const char *name, void *function) {
    void *found = library ? dlsym(library, name) : NULL;
    found_all &= found != NULL;
    memcpy(function, &found, sizeof found); // C knows no cast from an object's pointer to a function's
}

static void load(void) {
    void *library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    found_all = true;
    find(library, "EVP_CIPHER_CTX_new", &evp.context_new);
    find(library, "EVP_CIPHER_CTX_free", &evp.context_free);
    find(library, "EVP_aes_256_gcm", &evp.aes_256_gcm);
    find(library, "EVP_chacha20_poly1305", &evp.chacha20_poly1305);
    find(library, "EVP_CipherInit_ex", &evp.init);
    find(library, "EVP_CipherUpdate", &evp.update);
    find(library, "EVP_CipherFinal_ex", &evp.final);
    find(library, "EVP_CIPHER_CTX_ctrl", &evp.ctrl);
}

bool cipher_available(void) {
    pthread_once(&once, load);
    return found_all;
}

bool cipher_make(struct cipher *cipher, bool aes, bool seals, const uint8_t *key) {
    *cipher = (struct cipher){.seals = seals};
    if (!cipher_available()) return false;
    cipher->context = evp.context_new();
    if (!cipher->context) return false;
    return evp.init(cipher->context, aes ? evp.aes_256_gcm() : evp.chacha20_poly1305(), NULL, key, NULL, seals) == 1;
}

void cipher_free(struct cipher *cipher) {
    if (cipher->context) evp.context_free(cipher->context);
    cipher->context = NULL;
}

static bool begin(struct cipher *cipher) {
    uint8_t nonce[NONCE] = {0};
    uint64_t count = cipher->n_frames++;
    for (int i = 0; i < 8; i++) nonce[i] = (uint8_t)(count >> (8 * i));
    return evp.init(cipher->context, NULL, NULL, NULL, nonce, cipher->seals) == 1;
}

bool cipher_seal(struct cipher *cipher, uint8_t *out, size_t n_head, const void *head, size_t n, const void *body) {
    int n_out;
    return begin(cipher) && evp.update(cipher->context, out, &n_out, head, (int)n_head) == 1 &&
           evp.update(cipher->context, out + n_head, &n_out, body, (int)n) == 1 &&
           evp.final(cipher->context, out + n_head + n, &n_out) == 1 &&
           evp.ctrl(cipher->context, CTRL_GET_TAG, CIPHER_TAG, out + n_head + n) == 1;
}

bool cipher_open(struct cipher *cipher, size_t n, uint8_t *sealed) {
    int n_out;
    return begin(cipher) && evp.update(cipher->context, sealed, &n_out, sealed, (int)n) == 1 &&
           evp.ctrl(cipher->context, CTRL_SET_TAG, CIPHER_TAG, sealed + n) == 1 &&
           evp.final(cipher->context, sealed + n, &n_out) == 1;
}
