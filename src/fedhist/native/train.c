/* Local training of a small convolutional net, residual or not, all steps of one client in one call.
 *
 * Activations lie as [channel, row, column, example]: a vector register holds the same pixel of several examples.
 * Weights are then scalars, used where PyTorch's flat parameter vector has them, and convolutions of any size,
 * stride and padding are the same loop over registers. A linear layer is a convolution of 1×1 images; flattening
 * is nothing at all. Zero padding is a margin around the input that stays zero.
 *
 * Nothing is global and nothing allocated: threads that bring their own scratch memory do not meet.
 */
#include "descent.h"
#include "dropout.h"
#include "losses.h"
#include "norm.h"
#include "winograd.h"

/* Where a convolution's patch elements and channels lie, as distances in vectors. */
static void measure(const Layer *layer, Image in, Image out, const Space *space) {
    int32_t *patch = space->patch;
    for (int channel = 0; channel < layer->channels; channel++)
        for (int y = 0; y < layer->kernel_height; y++)
            for (int x = 0; x < layer->kernel_width; x++)
                *patch++ = (int32_t)(channel * in.plane + y * in.row + x * space->vectors);
    for (int channel = 0; channel < layer->out_channels; channel++)
        space->plane[channel] = (int32_t)(channel * out.plane);
}

/* Bring examples into the lanes. Lanes left over repeat the first example; the loss leaves them out. */
static void gather(const Net *net, const float *x, const int64_t *index, int examples, const Space *space) {
    const Layer *layer = net->layers;
    int stride = space->vectors * LANES;
    ptrdiff_t size = (ptrdiff_t)layer->channels * layer->height * layer->width;
    Image in = image_of(net, 0, layer->height, layer->width, space->vectors, space->values[0]);
    for (int channel = 0; channel < layer->channels; channel++)
        for (int y = 0; y < layer->height; y++) {
            float *target = (float *)(in.at + channel * in.plane + y * in.row);
            const float *source = x + (ptrdiff_t)(channel * layer->height + y) * layer->width;
            for (int lane = 0; lane < stride; lane++) {
                const float *row = source + index[lane < examples ? lane : 0] * size;
                for (int column = 0; column < layer->width; column++) target[column * stride + lane] = row[column];
            }
        }
}

/* Convolve `in` into row `y` of `out`, or with the first row into all of them. */
static void convolve_row(const Layer *layer, int y, const float *weight, const float *bias, Image in, Image out,
                         const Space *space) {
    if (!in_tiles(layer)) convolve(layer, y, false, weight, bias, in, out, space);
    else if (y == 0) convolve_tiles(layer, weight, bias, in, out, space);
}

/* Compute all values. Most layers go row by row, so that a row is used while it is in the cache. */
static void forward(const Net *net, const float *parameters, uint64_t key, const Space *space) {
    for (int64_t l = 0; l < net->num_layers; l++) {
        const Layer *layer = net->layers + l;
        const float *weight = layer->weight < 0 ? NULL : parameters + layer->weight;
        const float *bias = layer->bias < 0 ? NULL : parameters + layer->bias;
        int vectors = space->vectors;
        Image in = input_image(net, layer, layer->input, vectors, space->values[layer->input]);
        Image out = output_image(net, layer, vectors, space->values[l + 1]), other = {0};
        if (layer->other >= 0) other = input_image(net, layer, layer->other, vectors, space->values[layer->other]);
        if (layer->kind == GROUP_NORM)
            normalize(layer, weight, bias, in, out, statistics(net, layer, vectors, space->values[l + 1]), vectors);
        if (layer->kind == CONVOLUTION) measure(layer, in, out, space);
        for (int y = 0; layer->kind != GROUP_NORM && y < layer->out_height; y++) {
            if (layer->kind == CONVOLUTION) convolve_row(layer, y, weight, bias, in, out, space);
            else if (layer->kind == SUM) add_row(layer, y, in, other, out, vectors);
            else if (drops(layer)) drop(layer, y, key, false, in, out, vectors);
            else if (layer->kind == GELU || layer->kind == GELU_TANH) gelu(layer, y, false, false, in, in, out, vectors);
            else pool(layer, y, false, in, out, in, out, vectors);
            if (layer->kind != SUM) activate(layer, y, false, out, out, vectors);
        }
    }
}

/* Add gradients of a convolution's biases and weights. Weights take several rows at once: each time all their lanes are
 * summed. */
static void parameter_gradients(const Layer *layer, int y, Image in, Image out_slope, const Space *space) {
    int run = layer->out_width * space->vectors, block = run < STRETCH ? STRETCH / run : 1, first = y / block * block;
    for (int channel = 0; layer->bias >= 0 && channel < layer->out_channels; channel++) {
        lanes sum = splat(0);
        for (int n = 0; n < run; n++) sum += out_slope.at[channel * out_slope.plane + y * out_slope.row + n];
        space->gradient[layer->bias + channel] += sum_of_lanes(sum);
    }
    if (!is_linear(layer) && !in_tiles(layer) && (y == first + block - 1 || y == layer->out_height - 1))
        convolution_gradient(layer, first, y - first + 1, in, out_slope, space);
}

/* Take a layer's gradient back to one of its inputs, and with the first one to its parameters. */
static void backward_layer(const Net *net, const Layer *layer, int64_t value, bool first, const float *parameters,
                           uint64_t key, const Space *space) {
    bool add = space->begun[value], windows = layer->kind <= AVERAGE_POOL, wanted = value > 0;
    int vectors = space->vectors, clean = add ? layer->height + 2 * layer->pad_height : 0;
    int64_t l = layer - net->layers;
    const float *weight = layer->weight < 0 ? NULL : parameters + layer->weight;
    Image in = input_image(net, layer, value, vectors, space->values[value]);
    Image out = output_image(net, layer, vectors, space->values[l + 1]);
    Image out_slope = output_image(net, layer, vectors, slope_at(net, l + 1, space)), in_slope = {0};
    if (wanted) in_slope = input_image(net, layer, value, vectors, slope_at(net, value, space));
    if (layer->kind == GROUP_NORM)
        normalize_back(layer, weight, add, in, out, in_slope, out_slope,
                       statistics(net, layer, vectors, space->values[l + 1]), space);
    if (layer->kind == CONVOLUTION) measure(layer, in, out, space);
    for (int y = 0; layer->kind != GROUP_NORM && y < layer->out_height; y++) {
        if (first) activate(layer, y, true, out, out_slope, vectors);
        if (layer->kind == CONVOLUTION) parameter_gradients(layer, y, in, out_slope, space);
        if (!wanted) continue;
        /* Gradients of windows add up. Rows begin at zero just before the first one. */
        int last = y == layer->out_height - 1 ? layer->height + 2 * layer->pad_height
                                              : y * layer->stride_height + layer->kernel_height;
        for (; windows && clean < last; clean++)
            for (int channel = 0; channel < layer->channels; channel++)
                memset(in_slope.at + channel * in_slope.plane + clean * in_slope.row, 0,
                       sizeof(lanes) * (size_t)((layer->width + 2 * layer->pad_width) * vectors));
        if (in_tiles(layer)) continue;
        if (layer->kind == CONVOLUTION) convolve(layer, y, true, weight, NULL, in_slope, out_slope, space);
        else if (layer->kind == SUM) add_row_back(layer, y, add, out_slope, in_slope, vectors);
        else if (drops(layer)) drop(layer, y, key, add, out_slope, in_slope, vectors);
        else if (!windows) gelu(layer, y, true, add, in, out_slope, in_slope, vectors);
        else pool(layer, y, true, in, out, in_slope, out_slope, vectors);
    }
    if (in_tiles(layer)) convolve_tiles_back(layer, weight, in, in_slope, out_slope, space);
    space->begun[value] = true;
}

/* Turn the gradient of the outputs, in their slot, into that of all parameters. */
static void backward(const Net *net, const float *parameters, uint64_t key, int examples, const Space *space) {
    memset(space->begun, false, (size_t)net->num_layers + 1);
    for (int64_t l = net->num_layers - 1; l >= 0; l--) {
        const Layer *layer = net->layers + l;
        size_t weights = (size_t)patch_size(layer) * (size_t)layer->out_channels;
        if (layer->kind == CONVOLUTION && !is_linear(layer))
            memset(space->gradient + layer->weight, 0, sizeof(float) * weights);
        if (layer->kind == CONVOLUTION && layer->bias >= 0)
            memset(space->gradient + layer->bias, 0, sizeof(float) * (size_t)layer->out_channels);
        backward_layer(net, layer, layer->input, true, parameters, key, space);
        if (layer->other > 0) backward_layer(net, layer, layer->other, false, parameters, key, space);
        if (layer->kind == CONVOLUTION && is_linear(layer)) {
            Image in = input_image(net, layer, layer->input, space->vectors, space->values[layer->input]);
            Image out_slope = output_image(net, layer, space->vectors, slope_at(net, l + 1, space));
            linear_gradient(layer, in, out_slope, examples, space, space->gradient + layer->weight);
        }
    }
}

/* Start a batch of another size: margins must be zero, and nothing may be left in the lanes of old. */
static void prepare(const Net *net, int64_t examples, char *scratch, Space *space) {
    int64_t vectors = (examples + LANES - 1) / LANES;
    if (space->vectors == vectors) return;
    carve(net, vectors * LANES, (uintptr_t)scratch, space);
    memset(space->images, 0, space->image_bytes);
}

/* Return the bytes of scratch memory, aligned to 64, that batches of up to so many examples take. */
size_t fedhist_scratch(const Net *net, int64_t batch, int64_t adam) {
    return carve(net, (batch + LANES - 1) / LANES * LANES, 0, &(Space){.adam = adam != SGD});
}

/* Train from `received` on minibatches, whose sizes and examples are listed end to end, and write the upload.
 * `shift`, if any, is added to the gradient of every step. */
void fedhist_train(const Net *net, const Descent *descent, const float *x, const void *y, const int64_t *index,
                   const int64_t *sizes, int64_t steps, const float *received, const float *shift, float *upload,
                   char *scratch) {
    Space space = {.adam = descent->adam != SGD};
    size_t flat = sizeof(float) * (size_t)net->num_parameters;
    for (int64_t step = 0; step < steps; index += sizes[step++]) {
        int examples = (int)sizes[step];
        uint64_t key = step_key(descent->key, step);
        prepare(net, examples, scratch, &space);
        if (step == 0) {
            memcpy(space.local, received, flat);
            memset(space.gradient, 0, flat);
            memset(space.velocity, 0, flat);
            if (space.adam) memset(space.squares, 0, flat);
        }
        gather(net, x, index, examples, &space);
        forward(net, space.local, key, &space);
        differentiate(net, y, index, examples, &space);
        backward(net, space.local, key, examples, &space);
        descend(net->num_parameters, descent, step, received, shift, &space);
    }
    for (int64_t i = 0; i < net->num_parameters; i++) upload[i] = received[i] - space.local[i];
}

/* Write a model's outputs for some examples, one row for each. */
void fedhist_outputs(const Net *net, const float *parameters, const float *x, const int64_t *index, int64_t count,
                     int64_t batch, float *outputs, char *scratch) {
    Space space = {0};
    int width = net->layers[net->num_layers - 1].out_channels;
    for (int64_t at = 0; at < count; at += batch) {
        int examples = (int)(count - at < batch ? count - at : batch);
        prepare(net, examples, scratch, &space);
        gather(net, x, index + at, examples, &space);
        forward(net, parameters, 0, &space);
        const float *output = (const float *)space.values[net->num_layers];
        for (int e = 0; e < examples; e++)
            for (int c = 0; c < width; c++) *outputs++ = output[c * space.vectors * LANES + e];
    }
}
