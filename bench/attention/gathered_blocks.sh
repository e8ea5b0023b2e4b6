# scripts of a measurement, removed after it
B=bench/attention/indexed_attention.py; G=bench/attention/gathered_blocks
(M=axk2 CUDA_VISIBLE_DEVICES=0 timeout 80 python3 ${G}_tune.py $OUT/b1 > $OUT/tune1.log 2>&1) & (M=v32 CUDA_VISIBLE_DEVICES=1 timeout 80 python3 ${G}_tune.py $OUT/b2 > $OUT/tune2.log 2>&1); wait
cat $OUT/tune1.log $OUT/tune2.log | tail -60; python3 ${G}_apply.py $OUT/b1 $OUT/b2; date
(CUDA_VISIBLE_DEVICES=0 timeout 100 python3 $B --world 1 --models axk2 --out $OUT/one_axk2.json > $OUT/one1.log 2>&1) & (CUDA_VISIBLE_DEVICES=1 timeout 100 python3 $B --world 1 --models deepseek_v32 --lengths 16384,32768,65536 --out $OUT/one_v32.json > $OUT/one2.log 2>&1); wait
tail -3 $OUT/one1.log $OUT/one2.log; date
timeout 80 python3 -m torch.distributed.run --nproc-per-node 2 bench/training/indexed_step.py --out $OUT/step.json > $OUT/step.log 2>&1; tail -3 $OUT/step.log; date
timeout 130 python3 $B --world 2 --out $OUT/two.json > $OUT/two.log 2>&1; tail -3 $OUT/two.log; date
