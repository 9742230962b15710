import sys, random
sys.path.insert(0,'.')
import bus.log; bus.log.configure(level="critical", json=True)
import tests.model.test_transfer_model as t
from collections import Counter
s=t.build(random.Random(int(sys.argv[1])))
t.TransferPlay(s,Counter()).run()
