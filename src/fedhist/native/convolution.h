/* Convolutions, and linear layers as convolutions of 1×1 images, row by row. */
#pragma once
#include "layers.h"

/* sum[r][c] += Σ_k weight[r·row_step + k·term_step] · column[c][term[k]] */
INLINE void accumulate(int rows, int columns, lanes sum[ROWS][COLUMNS], const float *weight, ptrdiff_t row_step,
                       ptrdiff_t term_step, int terms, const lanes *const *column, const int32_t *term) {
    for (int k = 0; k < terms; k++, weight += term_step) {
        lanes value[COLUMNS];
        UNROLL for (int c = 0; c < columns; c++) value[c] = column[c][term[k]];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < columns; c++) sum[r][c] += splat(weight[r * row_step]) * value[c];
    }
}

typedef struct {
    const float *weight, *bias; /* bias: NULL is none */
    ptrdiff_t row_step, term_step;
    int terms;
    const int32_t *term, *place; /* where the source has its terms, and the target its rows */
    bool add;                    /* to what the target holds */
} Product;

INLINE void product_tile(int rows, int columns, const Product *p, int row, const lanes *const *from,
                         lanes *const *to) {
    lanes sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sum[r][c] = splat(p->bias ? p->bias[row + r] : 0);
    accumulate(rows, columns, sum, p->weight + row * p->row_step, p->row_step, p->term_step, p->terms, from, p->term);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) {
            lanes *target = to[c] + p->place[row + r];
            *target = p->add ? *target + sum[r][c] : sum[r][c]; /* one by one: patches overlap */
        }
}

/* Convolve `in` into row `y` of `out`, or take that row's gradient back to `in`: the same sums of products, of
 * patches for each channel or of channels for each element of a patch. */
static void convolve(const Layer *layer, int y, bool back, const float *weight, const float *bias, Image in, Image out,
                     const Space *space) {
    int vectors = space->vectors, patch = patch_size(layer), channels = layer->out_channels;
    Product product = back ? (Product){weight, NULL, 1, patch, channels, space->plane, space->patch, true}
                           : (Product){weight, bias, patch, 1, patch, space->patch, space->plane, false};
    int rows = back ? patch : channels, run = layer->out_width * vectors;
    for (int n = 0, columns; n < run; n += columns) {
        columns = next_of(run - n, COLUMNS);
        lanes *ins[COLUMNS] = {0}, *outs[COLUMNS] = {0};
        UNROLL for (int c = 0; c < columns; c++) {
            ptrdiff_t x = (n + c) / vectors, vector = (n + c) % vectors;
            ins[c] = in.at + y * layer->stride_height * in.row + x * layer->stride_width * vectors + vector;
            outs[c] = out.at + y * out.row + n + c;
        }
        lanes *const *from = back ? outs : ins, *const *to = back ? ins : outs;
        for (int row = 0, count; row < rows; row += count) {
            count = next_of(rows - row, ROWS);
#define TILE(r, c) product_tile(r, c, &product, row, (const lanes *const *)from, to)
            WITH_CONSTANTS(count, columns, TILE)
#undef TILE
        }
    }
}

enum { STRETCH = 64 }; /* about as many vectors of each channel are in the cache while weight gradients are summed */

/* Rows of pixels, as stretches whose vectors lie end to end in input and output. */
typedef struct {
    int height, count, run; /* rows; stretches of a row; vectors of a stretch */
    ptrdiff_t in_row, in_step, out_row;
} Stretch;

/* sums[r][c] += Σ over some rows of pixels of out[plane[r]] · in[patch[c]], for `run` vectors at a stretch. */
INLINE void gradient_tile(int rows, int columns, const lanes *in, const lanes *out, const Stretch *s,
                          const int32_t *patch, const int32_t *plane, lanes *sums, ptrdiff_t step) {
    lanes sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sum[r][c] = sums[r * step + c];
    for (int y = 0; y < s->height; y++)
        for (int x = 0; x < s->count; x++) {
            const lanes *ins[COLUMNS], *outs[ROWS];
            UNROLL for (int c = 0; c < columns; c++) ins[c] = in + y * s->in_row + x * s->in_step + patch[c];
            UNROLL for (int r = 0; r < rows; r++) outs[r] = out + y * s->out_row + x * s->run + plane[r];
            for (ptrdiff_t n = 0; n < s->run; n++) {
                lanes value[COLUMNS];
                UNROLL for (int c = 0; c < columns; c++) value[c] = ins[c][n];
                UNROLL for (int r = 0; r < rows; r++) {
                    lanes slope = outs[r][n];
                    KEEP(slope);
                    UNROLL for (int c = 0; c < columns; c++) sum[r][c] += slope * value[c];
                }
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sums[r * step + c] = sum[r][c];
}

/* Add what `height` rows of output pixels from row `y` on give to the gradient of all weights. */
static void convolution_gradient(const Layer *layer, int y, int height, Image in, Image out, const Space *space) {
    int patch = patch_size(layer), channels = layer->out_channels, vectors = space->vectors;
    bool dense = layer->stride_width == 1; /* a row of pixels is one stretch */
    Stretch stretch = {height, dense ? 1 : layer->out_width, dense ? layer->out_width * vectors : vectors,
                       layer->stride_height * in.row, (ptrdiff_t)layer->stride_width * vectors, out.row};
    const lanes *ins = in.at + y * layer->stride_height * in.row, *outs = out.at + y * out.row;
    for (int row = 0, rows; row < channels; row += rows) {
        rows = next_of(channels - row, ROWS);
        for (int column = 0, columns; column < patch; column += columns) {
            columns = next_of(patch - column, COLUMNS);
            lanes *sums = space->sums + (ptrdiff_t)row * patch + column;
#define TILE(r, c) gradient_tile(r, c, ins, outs, &stretch, space->patch + column, space->plane + row, sums, patch)
            WITH_CONSTANTS(rows, columns, TILE)
#undef TILE
        }
    }
}

/* Some outputs' weight gradients for some vectors of features: here lanes are features, and examples are summed. */
INLINE void linear_tile(int rows, int columns, const float *slope, int stride, int examples, const float *input,
                        const int32_t *example, int features, int left, float *gradient) {
    lanes sum[ROWS][COLUMNS];
    const lanes *column[COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) column[c] = (const lanes *)input + c;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sum[r][c] = splat(0);
    accumulate(rows, columns, sum, slope, stride, 1, examples, column, example);
    UNROLL for (int r = 0; r < rows; r++, gradient += features) {
        for (int c = 0; c < columns - 1; c++) memcpy(gradient + c * LANES, &sum[r][c], sizeof(lanes));
        int rest = left - (columns - 1) * LANES;
        memcpy(gradient + (columns - 1) * LANES, &sum[r][columns - 1], rest < LANES ? 4 * (size_t)rest : sizeof(lanes));
    }
}

static void linear_gradient(const Layer *layer, Image in, Image out, int examples, const Space *space,
                            float *gradient) {
    int features = layer->channels, vectors = (features + LANES - 1) / LANES, stride = (int)out.plane * LANES;
    const float *slope = (const float *)out.at;
    for (int f = 0; f < features; f++)
        for (int e = 0; e < examples; e++)
            space->transposed[(ptrdiff_t)e * vectors * LANES + f] = ((const float *)(in.at + f * in.plane))[e];
    for (int e = 0; e < examples; e++) space->patch[e] = e * vectors;
    for (int column = 0, columns; column < vectors; column += columns) {
        columns = next_of(vectors - column, COLUMNS);
        int first = column * LANES;
        for (int row = 0, rows; row < layer->out_channels; row += rows) {
            rows = next_of(layer->out_channels - row, ROWS);
#define TILE(r, c)                                                                                                  \
    linear_tile(r, c, slope + (ptrdiff_t)row * stride, stride, examples, space->transposed + first, space->patch,   \
                features, features - first, gradient + (ptrdiff_t)row * features + first)
            WITH_CONSTANTS(rows, columns, TILE)
#undef TILE
        }
    }
}
