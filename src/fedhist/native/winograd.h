/* Convolutions of 3×3 pixels with stride 1 by Winograd's F(2×2, 3×3) (Lavin and Gray, 2016):
 * Y = Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A for filters g, tiles of 4×4 inputs d and of 2×2 outputs Y, 16 products for four
 * outputs instead of 36. At each of the 16 places these are matrix products, summed over channels. Gradients are the
 * transposes of all that. */
#pragma once
#include "convolution.h"

enum { INPUT, OUTPUT, FILTER, INPUT_SLOPE, OUTPUT_SLOPE, FILTER_SLOPE }; /* Bᵀ, Aᵀ, G; B, A, Gᵀ */

/* Transform a line of a tile, of four values or fewer. */
INLINE void transform_line(int kind, lanes *at, int step) {
    lanes a = at[0], b = at[step], c = at[2 * step], d = at[3 * step], half = splat(0.5f);
    if (kind == INPUT) at[0] = a - c, at[step] = b + c, at[2 * step] = c - b, at[3 * step] = b - d;
    if (kind == OUTPUT) at[0] = a + b + c, at[step] = b - c - d;
    if (kind == FILTER) at[step] = (a + b + c) * half, at[2 * step] = (a - b + c) * half, at[3 * step] = c;
    if (kind == INPUT_SLOPE) at[step] = b - c + d, at[2 * step] = b + c - a, at[3 * step] = -d;
    if (kind == OUTPUT_SLOPE) at[step] = a + b, at[2 * step] = a - b, at[3 * step] = -b;
    if (kind == FILTER_SLOPE) at[0] = a + (b + c) * half, at[step] = (b - c) * half, at[2 * step] = (b + c) * half + d;
}

INLINE int size_before(int kind) { return kind == OUTPUT_SLOPE ? 2 : kind == FILTER ? 3 : SIDE; }
INLINE int size_after(int kind) { return kind == OUTPUT ? 2 : kind == FILTER_SLOPE ? 3 : SIDE; }

INLINE void transform(int kind, lanes *tile) {
    UNROLL for (int y = 0; y < size_before(kind); y++) transform_line(kind, tile + SIDE * y, 1);
    UNROLL for (int x = 0; x < size_after(kind); x++) transform_line(kind, tile + x, SIDE);
}

/* Transformed tiles: for each of a tile's places and each channel `count` vectors. */
typedef struct {
    lanes *at;
    int count;
    ptrdiff_t channel, place;
} Tiles;

/* Distances are odd, so that places do not compete for the same lines of a cache. */
static Tiles tiles_of(lanes *at, int channels, int count) {
    ptrdiff_t channel = count | 1;
    return (Tiles){at, count, channel, (channel * channels) | 1};
}

/* Where the corners of the tiles from a vector on lie in an image. */
static void find_corners(const Layer *layer, int first, int count, Image image, int vectors, int32_t *corner) {
    int width = layer->out_width / 2;
    for (int n = 0; n < count; n++) {
        int tile = (first + n) / vectors;
        corner[n] = (int32_t)(tile / width * 2 * image.row + tile % width * 2 * vectors + (first + n) % vectors);
    }
}

INLINE void into_tiles(int kind, Image image, int channels, const int32_t *corner, int vectors, Tiles tiles) {
    for (int channel = 0; channel < channels; channel++)
        for (int n = 0; n < tiles.count; n++) {
            const lanes *from = image.at + channel * image.plane + corner[n];
            lanes tile[PLACES], *to = tiles.at + channel * tiles.channel + n;
            UNROLL for (int y = 0; y < size_before(kind); y++)
                UNROLL for (int x = 0; x < size_before(kind); x++)
                    tile[SIDE * y + x] = from[y * image.row + x * vectors];
            transform(kind, tile);
            UNROLL for (int y = 0; y < SIDE; y++)
                UNROLL for (int x = 0; x < SIDE; x++) to[(SIDE * y + x) * tiles.place] = tile[SIDE * y + x];
        }
}

/* Gradients of tiles that overlap add up. */
INLINE void from_tiles(int kind, Tiles tiles, const float *bias, int channels, const int32_t *corner, int vectors,
                       Image image) {
    for (int channel = 0; channel < channels; channel++)
        for (int n = 0; n < tiles.count; n++) {
            const lanes *from = tiles.at + channel * tiles.channel + n;
            lanes tile[PLACES], *to = image.at + channel * image.plane + corner[n];
            UNROLL for (int y = 0; y < SIDE; y++)
                UNROLL for (int x = 0; x < SIDE; x++) tile[SIDE * y + x] = from[(SIDE * y + x) * tiles.place];
            transform(kind, tile);
            UNROLL for (int y = 0; y < size_after(kind); y++)
                UNROLL for (int x = 0; x < size_after(kind); x++) {
                    lanes *target = to + y * image.row + x * vectors;
                    lanes value = tile[SIDE * y + x];
                    *target = kind == INPUT_SLOPE ? *target + value : value + splat(bias ? bias[channel] : 0);
                }
        }
}

/* Transform the weights of all filters, as vectors of channels. */
static void transform_filters(const Layer *layer, const float *weight, float *filters) {
    int channels = layer->channels, square = layer->kernel_height * layer->kernel_width;
    ptrdiff_t pairs = (ptrdiff_t)channels * layer->out_channels;
    for (ptrdiff_t first = 0; first < pairs; first += LANES) {
        int count = pairs - first < LANES ? (int)(pairs - first) : LANES;
        lanes tile[PLACES] = {{0}};
        for (int c = 0; c < count; c++)
            for (int tap = 0; tap < square; tap++)
                tile[tap / 3 * SIDE + tap % 3][c] = weight[(first + c) * square + tap];
        transform(FILTER, tile);
        for (int p = 0; p < PLACES; p++) memcpy(filters + p * pairs + first, &tile[p], sizeof(float) * (size_t)count);
    }
}

/* Take the gradients of transformed weights back to the weights. */
static void transform_filters_back(const Layer *layer, const float *slopes, float *gradient) {
    int channels = layer->channels, square = layer->kernel_height * layer->kernel_width;
    ptrdiff_t pairs = (ptrdiff_t)channels * layer->out_channels;
    for (ptrdiff_t first = 0; first < pairs; first += LANES) {
        int count = pairs - first < LANES ? (int)(pairs - first) : LANES;
        lanes tile[PLACES] = {{0}};
        for (int p = 0; p < PLACES; p++) memcpy(&tile[p], slopes + p * pairs + first, sizeof(float) * (size_t)count);
        transform(FILTER_SLOPE, tile);
        for (int c = 0; c < count; c++)
            for (int tap = 0; tap < square; tap++)
                gradient[(first + c) * square + tap] = tile[tap / 3 * SIDE + tap % 3][c];
    }
}

/* Multiply filters and tiles at each place, or with `back` the transposed filters and the gradients of outputs. */
static void multiply(const Layer *layer, bool back, Tiles in, Tiles out, const Space *space) {
    int channels = layer->channels, outs = layer->out_channels;
    for (int place = 0; place < PLACES; place++) {
        const float *filter = space->filters + (ptrdiff_t)place * channels * outs;
        Product product = back ? (Product){filter, NULL, 1, channels, outs, space->plane, space->patch, false}
                               : (Product){filter, NULL, channels, 1, channels, space->patch, space->plane, false};
        for (int n = 0, columns; n < in.count; n += columns) {
            columns = next_of(in.count - n, COLUMNS);
            lanes *ins[COLUMNS] = {0}, *targets[COLUMNS] = {0};
            UNROLL for (int c = 0; c < columns; c++) {
                ins[c] = in.at + place * in.place + n + c;
                targets[c] = out.at + place * out.place + n + c;
            }
            products(&product, back ? channels : outs, columns, back ? targets : ins, back ? ins : targets);
        }
    }
}

/* Some tiles of a layer's input and output, and where their corners lie there. */
typedef struct {
    Tiles in, out;
    int32_t in_corner[TILES], out_corner[TILES];
} Part;

static int tile_vectors(const Layer *layer, int vectors) {
    return layer->out_height / 2 * (layer->out_width / 2) * vectors;
}

/* The tiles from a vector on, as many as are used while they are cached, and the tables for their products. */
static Part part_of(const Layer *layer, int first, Image in, Image out, const Space *space) {
    int left = tile_vectors(layer, space->vectors) - first, count = left < TILES ? left : TILES;
    Part part = {tiles_of(space->tiles, layer->channels, count),
                 tiles_of(space->out_tiles, layer->out_channels, count), {0}, {0}};
    for (int c = 0; c < layer->channels; c++) space->patch[c] = (int32_t)(c * part.in.channel);
    for (int c = 0; c < layer->out_channels; c++) space->plane[c] = (int32_t)(c * part.out.channel);
    find_corners(layer, first, count, in, space->vectors, part.in_corner);
    find_corners(layer, first, count, out, space->vectors, part.out_corner);
    return part;
}

static void convolve_tiles(const Layer *layer, const float *weight, const float *bias, Image in, Image out,
                           const Space *space) {
    int vectors = space->vectors;
    transform_filters(layer, weight, space->filters);
    for (int first = 0; first < tile_vectors(layer, vectors); first += TILES) {
        Part part = part_of(layer, first, in, out, space);
        into_tiles(INPUT, in, layer->channels, part.in_corner, vectors, part.in);
        multiply(layer, false, part.in, part.out, space);
        from_tiles(OUTPUT, part.out, bias, layer->out_channels, part.out_corner, vectors, out);
    }
}

/* Take the gradient of the output to the weights, and add it to that of the input, if it has a place. */
static void convolve_tiles_back(const Layer *layer, const float *weight, Image in, Image in_slope, Image out_slope,
                                const Space *space) {
    int vectors = space->vectors, channels = layer->channels, outs = layer->out_channels;
    size_t pairs = (size_t)channels * (size_t)outs;
    if (in_slope.at) transform_filters(layer, weight, space->filters);
    memset(space->filter_slopes, 0, sizeof(float) * PLACES * pairs);
    for (int first = 0; first < tile_vectors(layer, vectors); first += TILES) {
        Part part = part_of(layer, first, in, out_slope, space);
        into_tiles(INPUT, in, channels, part.in_corner, vectors, part.in);
        into_tiles(OUTPUT_SLOPE, out_slope, outs, part.out_corner, vectors, part.out);
        Stretch stretch = {1, 1, part.in.count, 0, 0, 0};
        for (int place = 0; place < PLACES; place++)
            gradients(outs, channels, part.in.at + place * part.in.place, part.out.at + place * part.out.place,
                      &stretch, space, space->filter_slopes + (size_t)place * pairs);
        if (!in_slope.at) continue;
        multiply(layer, true, part.in, part.out, space);
        from_tiles(INPUT_SLOPE, part.in, NULL, channels, part.in_corner, vectors, in_slope);
    }
    transform_filters_back(layer, space->filter_slopes, space->gradient + layer->weight);
}
