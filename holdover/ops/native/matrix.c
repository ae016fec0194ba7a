#include "common.h"

// Latent attention of a chunk, on the matrix unit of the processor (AMX, bfloat16).
//
// Row r of the queries is head r % heads of query r / heads, which sees keys up to start + r / heads. Keys are packed
// twice, in the two orders that the matrix unit reads: for scores by key columns, for values by key pairs.

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROWS 32         // query rows of a task: two tiles
#define SPAN 256        // keys between two rescalings
#define MAX_LATENT 1024

typedef struct __attribute__((packed)) {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

int holdover_matrix_unit(void) {
    static int ready = -1;
    if (ready < 0) ready = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, tile data
    return ready;
}

static void configure_tiles(void) {
    tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
}

// Tiles 0..3: sums of two query tiles by two column tiles; 4, 5: queries; 6, 7: columns.
static inline void multiply(const uint16_t *a, int64_t a_stride, const uint16_t *b, int64_t b_step, int64_t b_next,
                            int steps, float *out, int64_t out_stride, int add) {
    if (add) {
        _tile_loadd(0, out, out_stride * 4);
        _tile_loadd(1, out + 16, out_stride * 4);
        _tile_loadd(2, out + 16 * out_stride, out_stride * 4);
        _tile_loadd(3, out + 16 * out_stride + 16, out_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < steps; i++) {
        _tile_loadd(4, a + i * 32, a_stride * 2);
        _tile_loadd(5, a + 16 * a_stride + i * 32, a_stride * 2);
        _tile_loadd(6, b + i * b_step, 64);
        _tile_loadd(7, b + i * b_step + b_next, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + 16, out_stride * 4);
    _tile_stored(2, out + 16 * out_stride, out_stride * 4);
    _tile_stored(3, out + 16 * out_stride + 16, out_stride * 4);
}

static void softmax_span(float *scores, uint16_t *weights, float *sums, float *most, float *total, int64_t first_row,
                         int64_t first_key, int heads, int64_t start, int latent, float scale, int rows) {
    for (int r = 0; r < rows; r++) {
        float *s = scores + r * SPAN;
        int64_t seen = start + (first_row + r) / heads + 1 - first_key;  // keys of this span that the row may see
        seen = seen > SPAN ? SPAN : seen;
        uint16_t *w = weights + r * SPAN;
        if (seen <= 0) {
            memset(w, 0, SPAN * 2);
            continue;
        }
        float highest = -INFINITY;
#pragma omp simd reduction(max : highest)
        for (int c = 0; c < seen; c++) highest = s[c] > highest ? s[c] : highest;
        highest *= scale;
        const float before = most[r], now = highest > before ? highest : before;
        const float shrink = exp_single(before - now);
        float weight = 0.0f;
#pragma omp simd reduction(+ : weight)
        for (int c = 0; c < seen; c++) {
            s[c] = exp_single(s[c] * scale - now);
            weight += s[c];
        }
        for (int c = (int)seen; c < SPAN; c++) s[c] = 0.0f;
        for (int c = 0; c < SPAN; c++) w[c] = to_bf16(s[c]);
        total[r] = total[r] * shrink + weight;
        most[r] = now;
        if (shrink != 1.0f)
            for (int c = 0; c < latent; c++) sums[r * latent + c] *= shrink;
    }
}

// q: bf16 [queries * heads, width]; rows of the arena: row_stride bytes apart; table: slots of all keys, the chunk's own
// last; out: bf16 [queries * heads, latent]. width and latent are multiples of 32.
int holdover_latent_chunk(const uint16_t *q, const char *rows, int64_t row_stride, const int64_t *table, int64_t keys,
                          int64_t queries, int heads, int width, int latent, float scale, uint16_t *out,
                          int num_threads) {
    if (width % 32 || latent % 32 || latent > MAX_LATENT || width > MAX_LATENT) return -1;
    const int64_t spans = (keys + SPAN - 1) / SPAN, padded = spans * SPAN, all = queries * heads;
    const int steps = width / 32, columns = latent / 16;
    // By key columns: [key group of 16][step][16 pairs of numbers][16 keys][2]. By key pairs: [span of 32 keys][column
    // tile][16 pairs of keys][16 numbers][2].
    uint16_t *by_column = aligned_alloc(64, (size_t)padded * width * 2);
    uint16_t *by_pair = aligned_alloc(64, (size_t)padded * latent * 2);
    int status = by_column == NULL || by_pair == NULL ? -2 : 0;
    if (status == 0) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
#pragma omp for schedule(static)
            for (int64_t group = 0; group < padded / 32; group++) {
                const uint16_t *row[32];
                static const uint16_t zero[MAX_LATENT];
                for (int i = 0; i < 32; i++) {
                    const int64_t key = group * 32 + i;
                    row[i] = key < keys ? (const uint16_t *)(rows + table[key] * row_stride) : zero;
                }
                for (int half = 0; half < 2; half++) {
                    uint32_t *to = (uint32_t *)(by_column + (group * 2 + half) * 16 * width);
                    for (int c = 0; c < width / 2; c++)
                        for (int i = 0; i < 16; i++) memcpy(to + c * 16 + i, row[half * 16 + i] + 2 * c, 4);
                }
                for (int column = 0; column < columns; column++) {
                    uint16_t *to = by_pair + (group * columns + column) * 512;
                    for (int pair = 0; pair < 16; pair++)
                        for (int c = 0; c < 16; c++) {
                            to[pair * 32 + 2 * c] = row[2 * pair][column * 16 + c];
                            to[pair * 32 + 2 * c + 1] = row[2 * pair + 1][column * 16 + c];
                        }
                }
            }
            configure_tiles();
            float *scores = aligned_alloc(64, sizeof(float) * ROWS * SPAN);
            float *sums = aligned_alloc(64, sizeof(float) * (size_t)ROWS * latent);
            uint16_t *weights = aligned_alloc(64, 2 * ROWS * SPAN), *mine = aligned_alloc(64, 2 * (size_t)ROWS * width);
            float most[ROWS], total[ROWS];
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < (all + ROWS - 1) / ROWS; task++) {
                if (scores == NULL || sums == NULL || weights == NULL || mine == NULL) {
                    status = -2;
                    continue;
                }
                const int64_t first = task * ROWS;
                const int count = all - first < ROWS ? (int)(all - first) : ROWS;
                memset(mine, 0, 2 * (size_t)ROWS * width);
                memcpy(mine, q + first * width, 2 * (size_t)count * width);
                memset(sums, 0, sizeof(float) * (size_t)ROWS * latent);
                for (int r = 0; r < ROWS; r++) {
                    most[r] = -INFINITY;
                    total[r] = 0.0f;
                }
                const int64_t seen = keys - queries + (first + count - 1) / heads + 1;
                for (int64_t key = 0; key < seen; key += SPAN) {
                    for (int c = 0; c < SPAN; c += 32) {
                        if (key + c >= seen) break;
                        multiply(mine, width, by_column + (key + c) * width, 512, 16 * width, steps, scores + c, SPAN, 0);
                    }
                    softmax_span(scores, weights, sums, most, total, first, key, heads, keys - queries, latent, scale,
                                 ROWS);
                    const int64_t left = seen - key < SPAN ? (seen - key + 31) / 32 : SPAN / 32;
                    for (int column = 0; column < columns; column += 2)
                        multiply(weights, SPAN, by_pair + (key / 32 * columns + column) * 512, (int64_t)columns * 512,
                                 512, (int)left, sums + column * 16, latent, 1);
                }
                for (int r = 0; r < count; r++) {
                    for (int c = 0; c < latent; c++) sums[r * latent + c] /= total[r];
                    store_row(out, (first + r) * latent, sums + r * latent, latent, 1);
                }
            }
            free(scores);
            free(sums);
            free(weights);
            free(mine);
            _tile_release();
        }
    }
    free(by_column);
    free(by_pair);
    return status;
}

// Matrix products with packed weights: out = x W^T for groups of rows, each with a weight of its own.
//
// A weight [N, K] is packed as [pair of column tiles][step][2 tiles][16 pairs of numbers][16 columns][2], columns padded
// to a multiple of 32 with zeros. Nothing is compiled for a shape, and a small batch reads each weight once.

int64_t holdover_packed_size(int64_t n, int64_t k) { return (n + 31) / 32 * 32 * k; }

int holdover_pack(const uint16_t *weight, uint16_t *packed, int64_t n, int64_t k) {
    if (k % 32) return -1;
    for (int64_t column = 0; column < (n + 31) / 32 * 32; column++)
        for (int64_t i = 0; i < k; i++) {
            const int64_t pair = column / 32, tile = column % 32 / 16, step = i / 32, row = i % 32 / 2;
            packed[((pair * (k / 32) + step) * 2 + tile) * 512 + row * 32 + column % 16 * 2 + i % 2] =
                column < n ? weight[column * k + i] : 0;
        }
    return 0;
}

// As `multiply` with no sums before, for 16 rows.
static inline void multiply_half(const uint16_t *a, int64_t a_stride, const uint16_t *b, int steps, float *out) {
    _tile_zero(0);
    _tile_zero(1);
    for (int i = 0; i < steps; i++) {
        _tile_loadd(4, a + i * 32, a_stride * 2);
        _tile_loadd(6, b + i * 1024, 64);
        _tile_loadd(7, b + i * 1024 + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
}

static inline void store_pair(uint16_t *to, const float *sums, int64_t width) {
    const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + 16), _mm512_loadu_ps(sums));
    const __mmask32 kept = width >= 32 ? 0xFFFFFFFFu : (1u << width) - 1;
    _mm512_mask_storeu_epi16(to, kept, (__m512i)pair);
}

int holdover_products(const uint16_t *x, int64_t x_stride, const uint16_t *packed, const int64_t *starts,
                      int num_groups, uint16_t *out, int64_t out_stride, int64_t n, int64_t k, int num_threads) {
    const int64_t pairs = (n + 31) / 32, steps = k / 32;
    int status = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        configure_tiles();
        uint16_t *edge = aligned_alloc(64, 2 * 32 * (size_t)k);
        float *sums = aligned_alloc(64, sizeof(float) * 32 * 32);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < num_groups * pairs; task++) {
            const int64_t group = task / pairs, pair = task % pairs;
            const uint16_t *columns = packed + (group * pairs + pair) * steps * 1024;
            if (edge == NULL || sums == NULL) {
                status = -2;
                continue;
            }
            for (int64_t row = starts[group]; row < starts[group + 1]; row += 32) {
                const int64_t count = starts[group + 1] - row < 32 ? starts[group + 1] - row : 32;
                const int64_t needed = count > 16 ? 32 : 16;  // rows that tiles read
                const uint16_t *rows = x + row * x_stride;
                int64_t stride = x_stride;
                if (count < needed) {
                    for (int64_t r = 0; r < count; r++) memcpy(edge + r * k, rows + r * x_stride, 2 * (size_t)k);
                    memset(edge + count * k, 0, 2 * (size_t)((needed - count) * k));
                    rows = edge;
                    stride = k;
                }
                if (needed == 32)
                    multiply(rows, stride, columns, 1024, 512, (int)steps, sums, 32, 0);
                else
                    multiply_half(rows, stride, columns, (int)steps, sums);
                for (int64_t r = 0; r < count; r++)
                    store_pair(out + (row + r) * out_stride + pair * 32, sums + r * 32, n - pair * 32);
            }
        }
        free(edge);
        free(sums);
        _tile_release();
    }
    return status;
}
#else
int holdover_matrix_unit(void) { return 0; }
int holdover_latent_chunk(const uint16_t *q, const char *rows, int64_t row_stride, const int64_t *table, int64_t keys,
                          int64_t queries, int heads, int width, int latent, float scale, uint16_t *out,
                          int num_threads) {
    return -1;
}
int64_t holdover_packed_size(int64_t n, int64_t k) { return -1; }
int holdover_pack(const uint16_t *weight, uint16_t *packed, int64_t n, int64_t k) { return -1; }
int holdover_products(const uint16_t *x, int64_t x_stride, const uint16_t *packed, const int64_t *starts,
                      int num_groups, uint16_t *out, int64_t out_stride, int64_t n, int64_t k, int num_threads) {
    return -1;
}
#endif
