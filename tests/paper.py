"""What the paper's models count, as several tests need it."""

# Dense and hybrid (ratio 0.25) parameters. LSTM: 12,000 above the paper's table, nn.LSTM's second bias.
COUNTS = {
    "vgg19": (20_560_330, 8_370_634),
    "vgg19_one_fc": (20_035_018, 8_107_466),
    "resnet18": (11_173_834, 3_336_138),
    "resnet50": (25_557_032, 15_202_344),
    "wide_resnet50_2": (68_883_240, 40_047_400),
    "lstm": (85_974_278, 67_974_278),
    "transformer": (48_978_432, 26_696_192),
}
