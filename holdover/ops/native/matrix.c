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
#define AHEAD 4         // steps of a product that weights are asked for before they are needed

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

// Sums of up to 32 rows (two tiles; one if `halves` is 1) by one pair of column tiles. `cold`: the weights are asked for
// some panels ahead, because they are read once a step and are never near.
static inline void multiply_panel(const uint16_t *a, int64_t a_stride, int halves, const uint16_t *b, int steps,
                                  int cold, float *out) {
    if (halves == 2 && !cold) {
        multiply(a, a_stride, b, 1024, 512, steps, out, 32, 0);
        return;
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < steps; i++) {
        if (cold)
            for (int line = 0; line < 1024; line += 32)
                _mm_prefetch((const char *)(b + (i + AHEAD) * 1024 + line), _MM_HINT_T0);
        _tile_loadd(6, b + i * 1024, 64);
        _tile_loadd(7, b + i * 1024 + 512, 64);
        _tile_loadd(4, a + i * 32, a_stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (halves == 2) {
            _tile_loadd(5, a + 16 * a_stride + i * 32, a_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
    if (halves == 2) {
        _tile_stored(2, out + 16 * 32, 128);
        _tile_stored(3, out + 16 * 32 + 16, 128);
    }
}

static inline void store_pair(uint16_t *to, const float *sums, int64_t width) {
    const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + 16), _mm512_loadu_ps(sums));
    const __mmask32 kept = width >= 32 ? 0xFFFFFFFFu : (1u << width) - 1;
    _mm512_mask_storeu_epi16(to, kept, (__m512i)pair);
}

// silu(gate) * up of 16 numbers: the first tile of a pair holds the gates, the second what they gate.
static inline void store_gated(uint16_t *to, const float *sums) {
    float y[16];
    for (int i = 0; i < 16; i++) y[i] = sums[i] * sigmoid(sums[i]) * sums[16 + i];
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(y)));
}

// Room that each thread multiplies in.
typedef struct {
    uint16_t *edge;  // a block's last rows, filled up with zeros
    float *sums;
} scratch;

static scratch new_scratch(int64_t k) {
    scratch room = {aligned_alloc(64, 2 * 32 * (size_t)k), aligned_alloc(64, sizeof(float) * 32 * 32)};
    return room;
}

#define ROW_BLOCK 256  // rows that go through all weights together: they and a panel fit the near caches

// Rows [starts[g], starts[g + 1]) of x by group g's weight. Called by all threads of a team, which share the work; ends
// with a barrier. gated: see store_gated; out then has n / 2 columns.
static void products(const uint16_t *x, int64_t x_stride, const uint16_t *packed, const int64_t *starts, int num_groups,
                     uint16_t *out, int64_t out_stride, int64_t n, int64_t k, int gated, scratch room, int *status) {
    const int64_t pairs = (n + 31) / 32, steps = k / 32;
    int64_t tasks = 0, group = 0, first_task = 0;
    const uint16_t *copied = NULL;  // the row that `edge` was filled from
    for (int g = 0; g < num_groups; g++) tasks += (starts[g + 1] - starts[g] + ROW_BLOCK - 1) / ROW_BLOCK * pairs;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; task++) {
        if (room.edge == NULL || room.sums == NULL) {
            *status = -2;
            continue;
        }
        int64_t group_tasks;  // a thread's tasks come in rising order
        while (task >= first_task +
                           (group_tasks = (starts[group + 1] - starts[group] + ROW_BLOCK - 1) / ROW_BLOCK * pairs)) {
            first_task += group_tasks;
            group++;
        }
        const int64_t block = (task - first_task) / pairs, pair = (task - first_task) % pairs;
        const int64_t first = starts[group] + block * ROW_BLOCK;
        const int64_t end = starts[group + 1] - first < ROW_BLOCK ? starts[group + 1] : first + ROW_BLOCK;
        const uint16_t *columns = packed + (group * pairs + pair) * steps * 1024;
        for (int64_t row = first; row < end; row += 32) {
            const int64_t count = end - row < 32 ? end - row : 32;
            const int halves = count > 16 ? 2 : 1;
            const int64_t needed = halves * 16;  // rows that tiles read
            const uint16_t *rows = x + row * x_stride;
            int64_t stride = x_stride;
            if (count < needed) {
                if (copied != rows) {
                    for (int64_t r = 0; r < count; r++) memcpy(room.edge + r * k, rows + r * x_stride, 2 * (size_t)k);
                    memset(room.edge + count * k, 0, 2 * (size_t)((needed - count) * k));
                }
                copied = rows;
                rows = room.edge;
                stride = k;
            }
            multiply_panel(rows, stride, halves, columns, (int)steps, row == first && block == 0, room.sums);
            if (gated)
                for (int64_t r = 0; r < count; r++)
                    store_gated(out + (row + r) * out_stride + pair * 16, room.sums + r * 32);
            else
                for (int64_t r = 0; r < count; r++)
                    store_pair(out + (row + r) * out_stride + pair * 32, room.sums + r * 32, n - pair * 32);
        }
    }
}

// x [rows, heads, k], rows and heads lying apart, to out [rows, heads, n], each head by a weight of its own.
int holdover_products(const uint16_t *x, int64_t x_stride, int64_t x_head, const uint16_t *packed, int64_t rows, int heads,
                      uint16_t *out, int64_t out_stride, int64_t out_head, int64_t n, int64_t k, int num_threads) {
    const int64_t starts[2] = {0, rows}, size = (n + 31) / 32 * 32 * k;
    int status = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        configure_tiles();
        scratch room = new_scratch(k);
        for (int head = 0; head < heads; head++)
            products(x + head * x_head, x_stride, packed + head * size, starts, 1, out + head * out_head, out_stride, n, k,
                     0, room, &status);
        free(room.edge);
        free(room.sums);
        _tile_release();
    }
    return status;
}

// Gated feed-forward layers of experts: x [tokens, hidden] to out [tokens, hidden], on top of `shared` (may be NULL).
// gate_up: for each expert, tiles of gates and of what they gate in turn; down: as usual. experts: of each token its
// top_k; weights: theirs. experts NULL: one layer, all tokens go through it, no weights. hidden, inner: multiples of 32.
int holdover_feed_forward(const uint16_t *x, int64_t tokens, int64_t hidden, int64_t inner, const uint16_t *gate_up,
                          const uint16_t *down, int num_experts, const int64_t *experts, const float *weights, int top_k,
                          const uint16_t *shared, uint16_t *out, int num_threads) {
    if (hidden % 32 || inner % 32 || hidden > 16384 || num_experts > 4096) return -1;
    const int64_t choices = tokens * top_k;
    int64_t starts[num_experts + 1], next[num_experts];
    int64_t *place = malloc(sizeof(int64_t) * (size_t)(choices + 1));
    uint16_t *sorted = experts == NULL ? NULL : aligned_alloc(64, 2 * (size_t)(choices * hidden));
    uint16_t *results = experts == NULL ? NULL : aligned_alloc(64, 2 * (size_t)(choices * hidden));
    uint16_t *middle = aligned_alloc(64, 2 * (size_t)(choices * inner));
    int status = place == NULL || middle == NULL || (experts != NULL && (sorted == NULL || results == NULL)) ? -2 : 0;
    if (status == 0) {
        memset(starts, 0, sizeof starts);
        if (experts == NULL) starts[num_experts] = tokens;
        else {
            for (int64_t i = 0; i < choices; i++) starts[experts[i] + 1]++;
            for (int e = 0; e < num_experts; e++) {
                next[e] = starts[e];
                starts[e + 1] += starts[e];
            }
            for (int64_t i = 0; i < choices; i++) place[i] = next[experts[i]]++;
        }
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            configure_tiles();
            scratch room = new_scratch(hidden > inner ? hidden : inner);
            if (experts != NULL) {
#pragma omp for schedule(static)
                for (int64_t i = 0; i < choices; i++)
                    memcpy(sorted + place[i] * hidden, x + i / top_k * hidden, 2 * (size_t)hidden);
            }
            products(experts == NULL ? x : sorted, hidden, gate_up, starts, num_experts, middle, inner, 2 * inner, hidden, 1,
                     room, &status);
            products(middle, inner, down, starts, num_experts, experts == NULL ? out : results, hidden, hidden, inner, 0,
                     room, &status);
            if (experts != NULL) {
#pragma omp for schedule(static)
                for (int64_t t = 0; t < tokens; t++) {
                    float sum[hidden], row[hidden];
                    if (shared != NULL) load_row(sum, shared, t * hidden, (int)hidden, 1);
                    else memset(sum, 0, sizeof sum);
                    for (int i = 0; i < top_k; i++) {
                        const float w = weights[t * top_k + i];
                        load_row(row, results, place[t * top_k + i] * hidden, (int)hidden, 1);
                        for (int64_t c = 0; c < hidden; c++) sum[c] = fmaf(w, row[c], sum[c]);
                    }
                    store_row(out, t * hidden, sum, (int)hidden, 1);
                }
            }
            free(room.edge);
            free(room.sums);
            _tile_release();
        }
    }
    free(place);
    free(sorted);
    free(results);
    free(middle);
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
int holdover_products(const uint16_t *x, int64_t x_stride, int64_t x_head, const uint16_t *packed, int64_t rows, int heads,
                      uint16_t *out, int64_t out_stride, int64_t out_head, int64_t n, int64_t k, int num_threads) {
    return -1;
}
int holdover_feed_forward(const uint16_t *x, int64_t tokens, int64_t hidden, int64_t inner, const uint16_t *gate_up,
                          const uint16_t *down, int num_experts, const int64_t *experts, const float *weights, int top_k,
                          const uint16_t *shared, uint16_t *out, int num_threads) {
    return -1;
}
#endif
